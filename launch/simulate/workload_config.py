"""The section ``workload`` of a simulated run: the agents' lengths, their calls, and the times of everything else."""

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, model_validator

from ...actors.config_base import Config, Count, NonNegative, Positive, Share, Unit, no_bool
from ...actors.names import AgentName

WORKLOAD_RECIPE: Final = Path(__file__).parent / "workload_recipe"
"""The recipe of simulated runs, which plays a workload."""
_LONGEST_PROMPT: Final = 8

# Above them a number is mistyped: lengths and times are computed as exp(sigma * z), and sent in messages.
Tokens = Annotated[float, BeforeValidator(no_bool), Field(ge=1, le=1e8), Unit("tokens")]
Spread = Annotated[NonNegative, Field(le=10)]
Delay = Annotated[Positive, Field(le=1e7), Unit("s")]


class LengthsConfig(Config):
    """Lognormal lengths: ``median * exp(sigma * z)``, ``z`` standard normal."""

    median: Tokens
    """Median length."""
    sigma: Spread = 0.0
    """Spread of the lengths."""


class PromptConfig(LengthsConfig):
    """Lengths of an agent's prompts."""

    longest: Annotated[Count, Unit("tokens")] | None = None
    """Longest prompt. `null`: eight times the median."""
    computed: Share = 1.0
    """Part of their tokens that engines compute: the others are those of equal prompts, or known beginnings."""

    @property
    def most(self) -> int:
        """The longest prompt."""
        return int(_LONGEST_PROMPT * self.median) if self.longest is None else self.longest


class AgentWorkload(Config):
    """Lengths of an agent's turns. Answers are cut off at its ``sampling.max_new_tokens``."""

    prompt: PromptConfig
    """Lengths of its prompts."""
    answer: LengthsConfig
    """Lengths of its answers."""
    trained: Annotated[Positive, Field(le=1)] = 1.0
    """Part of the tokens of its samples, prompts included, that training computes: the others are those of samples
    without an advantage, and beginnings that another sample has too."""


class DelayConfig(Config):
    """Lognormal times."""

    median_s: Delay
    """Median time."""
    sigma: Spread = 0.0
    """Spread of the times."""


class CallConfig(Config):
    """Calls of an agent, one after the other, each followed by the environment."""

    agent: AgentName
    """Its name."""
    chance: Share = 1.0
    """Share of the trajectories that make this call."""
    times: Annotated[Count, Unit("calls")] = 1
    """Number of its calls."""


def _call(call: Any) -> Any:
    return {"agent": call} if isinstance(call, str) else call


def _stage(stage: Any) -> Any:
    return stage if isinstance(stage, list | tuple) else (stage,)


Call = Annotated[CallConfig, BeforeValidator(_call)]
Stage = Annotated[tuple[Call, ...], BeforeValidator(_stage), Field(min_length=1)]


class WorkloadConfig(Config):
    """A trajectory goes from stage to stage; the calls of one stage run at the same time."""

    agents: Annotated[dict[AgentName, AgentWorkload], Field(min_length=1)]
    """Lengths of each agent's turns."""
    calls: Annotated[tuple[Stage, ...], Field(min_length=1)]
    """Stages in their order: an agent, or a list of agents that are called at once."""
    queries_at_once: Annotated[Count, Unit("queries")] | None = None
    """Queries of a rollout worker whose trajectories are played at once, the others after them. `null`: all."""
    turn_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time of a rollout worker's processor for each turn. Turns that come together share it."""
    environment: DelayConfig | None = None
    """Time of the environment after each call, such as a tool's. `null`: none."""
    reward: DelayConfig | None = None
    """Time of the rewards at the end of a trajectory. `null`: none."""

    @model_validator(mode="after")
    def _called_agents_have_lengths(self) -> "WorkloadConfig":
        for stage in self.calls:
            for call in stage:
                if call.agent not in self.agents:
                    raise ValueError(
                        f"calls: agent {call.agent!r} has no lengths: write workload.agents.{call.agent} with prompt "
                        "and answer"
                    )
        return self
