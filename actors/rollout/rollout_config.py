"""Settings of rollouts: sampling and how workflows run."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from ..config_base import Config, Count, Natural, NonNegative, Positive, Seconds, Share, Unit
from ..demonstrations.demonstration_config import DemonstrationConfig
from ..environments.sandboxes.sandbox_config import LocalSandboxConfig, SandboxConfig
from ..filters.filter_config import FilterConfigs
from ..gateway.gateway_config import GatewayServerConfig
from ..messages import Truncation
from ..trees.tree_config import TreeConfig
from .groups.explorations import ExplorationsConfig
from .groups.group import Oversampled

OnTimeout = Literal["drop", "replace"]


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """The sampling of one turn. ``seed``: None for one that the turn's id gives."""

    temperature: float
    max_new_tokens: int
    truncation: Truncation | None
    stop: tuple[str, ...]
    seed: int | None = None


def _several(stop: Any) -> Any:
    """One string is a list of one, as in ``Agent.generate``."""
    return (stop,) if isinstance(stop, str) else stop


class SamplingConfig(Config):
    """The sampling of an agent's training turns; evaluations have a temperature of their own (``evaluation``).

    Temperature, truncation and stop strings may differ in a turn: see ``Agent.generate``. A workflow whose turn passes
    its deadline gets a CallTimeout; if it does not catch that, the trajectory has passed its deadline."""

    temperature: Positive = 1.0
    """Sampling temperature."""
    top_k: Annotated[Natural, Unit("tokens")] = 0
    """Number of the most probable tokens that are sampled from. 0 turns the limit off."""
    top_p: Share = 1.0
    """Probability of the most probable tokens together that are sampled from (nucleus). 1 turns the limit off."""
    min_p: NonNegative = 0.0
    """Least probability of a token that is sampled, as a share of the greatest. 0 turns the limit off. See [Truncated
    distributions](workflows.md#truncated-distributions)."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    """Strings that end a turn, or one: see [Options of a turn](workflows.md#options-of-a-turn)."""
    max_new_tokens: Annotated[Count, Unit("tokens")] = 64
    """Longest answer."""
    overlong_buffer: Annotated[Natural, Unit("tokens")] = 0
    """Tokens before `max_new_tokens` in which the length of a turn costs reward, up to 1 at `max_new_tokens` (DAPO,
    arXiv 2503.14476, eq. 13; there 4096 of 20480). An agent's reward in a trajectory is lowered by the cost of its
    longest turn; evaluations report the plain reward. 0 turns it off."""
    trajectory_turns: Annotated[Count, Unit("turns")] | None = None
    """Most turns of the agent in a trajectory: see [Limits](environments.md#limits). `null`: no limit."""
    trajectory_tokens: Annotated[Count, Unit("tokens")] | None = None
    """Most generated tokens of the agent in a trajectory. `null`: no limit."""
    turn_timeout_s: Seconds | None = None
    """Deadline of a turn of the agent. `null`: `rollout.turn_timeout_s`."""
    on_timeout: OnTimeout | None = None
    """Fate of a trajectory of the agent that passed its deadline. `null`: `rollout.on_timeout`."""

    @cached_property
    def defaults(self) -> TurnSampling:
        """The sampling of a turn without options."""
        truncation = Truncation(self.top_k, float(self.top_p), float(self.min_p))
        cut = None if truncation.leaves_all else truncation
        return TurnSampling(self.temperature, self.max_new_tokens, cut, self.stop)

    @model_validator(mode="after")
    def _truncation_and_stops_are_valid(self) -> "SamplingConfig":
        if (problem := Truncation(self.top_k, self.top_p, self.min_p).problem()) is not None:
            raise ValueError(problem)
        if "" in self.stop:
            raise ValueError("stop has an empty string")
        return self

    @model_validator(mode="after")
    def _buffer_fits(self) -> "SamplingConfig":
        if self.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} is more than max_new_tokens={self.max_new_tokens}: it is the "
                "last part of a turn's tokens"
            )
        return self


class RolloutConfig(Config):
    """The running of workflows: workers, failures, stragglers, over-provisioning, dynamic sampling.

    A trajectory that raises is dropped and counted; so is one that takes longer than its deadline, or has a turn that
    does. Trajectories of submitted queries do not count as failures of a step.

    A workflow that asks for a turn beyond a limit of turns or tokens gets a LimitReached. If it catches that, the
    rewards that it returns count as those of any other trajectory; if not, the trajectory fails.

    Over-provisioning biases learning: the first trajectories to end are the shorter ones."""

    workers: Annotated[Count, Unit("processes")] = 1
    """Processes that run workflows, `rollout-0`, `rollout-1` and so on. Queries are dealt to them."""
    processes: Annotated[Count, Unit("processes")] = 4
    """Most processes of each worker for [`in_process`](environments.md#blocking-code)."""
    setup_timeout_s: Seconds = 600.0
    """Deadline of the recipe's and the environment's `setup`."""
    max_failed_share: Share = 0.25
    """Share of a step's trajectories that may fail. With more the run ends, with the first traceback."""
    turn_retries: Natural = 3
    """Number of times that a turn whose instance is lost is begun again at another instance. Then its trajectory
    fails."""
    trajectory_timeout_s: Seconds = 1800.0
    """Deadline of a trajectory."""
    trajectory_turns: Annotated[Count, Unit("turns")] | None = None
    """Most turns of all agents in a trajectory: see [Limits](environments.md#limits). `null`: no limit."""
    trajectory_tokens: Annotated[Count, Unit("tokens")] | None = None
    """Most generated tokens of all agents in a trajectory; a turn may have at most the tokens that remain. `null`: no
    limit."""
    turn_timeout_s: Seconds = 600.0
    """Deadline of a turn."""
    on_timeout: OnTimeout = "drop"
    """Fate of a trajectory that passed a deadline: `drop` continues with its siblings, `replace` starts a new one in
    its place."""
    reward_grace_s: Seconds | None = None
    """Time after its own end that a group holds its step of `async` for rewards of a judge outside the run. Then the
    step lets it go, also if others still run, and it is trained later: see
    [Late rewards](experience-store.md#late-rewards). `null`: it holds its step until the rewards are there. Groups of
    [submitted queries](embedding.md#queries-of-a-program) hold none."""
    late_rewards_after_s: Seconds | None = None
    """Time that a trajectory waits for a reward of a [judge outside the run](experience-store.md#late-rewards). Then
    it is left out and counted as late: a step that its group holds closes without it. `null`: it waits for the
    column's `timeout_s`; then it fails, or is late if its group holds no step."""
    max_replacements: Annotated[Count, Unit("trajectories")] = 2
    """Most new trajectories of one group under `replace`."""
    min_trajectories: Annotated[Count, Unit("trajectories")] = 1
    """Survivors that a group needs. One with fewer is dropped."""
    extra_trajectories: Annotated[Natural, Unit("trajectories")] = 0
    """Trajectories of a query that are started beyond `training.trajectories_per_query`. The group closes with the
    first to succeed."""
    oversampled: Oversampled = "abort"
    """Fate of the trajectories that are left over then: `abort` stops them, `keep` has them run to their end, unused,
    for environments that must not be interrupted."""
    filters: FilterConfigs = ()
    """Filters that leave samples of a closed group out, in their order: names, functions `file.py:function`, or
    sections with a `name` and the keys [below](#rolloutfiltersequal_rewards). See
    [Group filters](modes.md#group-filters)."""
    tree: TreeConfig | None = None
    """Branches of training trajectories: see [Trees](environments.md#trees). `null`: a trajectory is one line."""
    demonstrations: DemonstrationConfig | None = None
    """Recorded trajectories that training trajectories follow: see [Demonstrations](environments.md#demonstrations).
    `null`: none."""
    explorations: ExplorationsConfig | None = None
    """Explorations of training queries. `null`: every trajectory of a query is trained."""
    sandbox: SandboxConfig = LocalSandboxConfig()
    gateway: GatewayServerConfig = GatewayServerConfig()
    """Servers of agent programs."""
    replacement_queries: Annotated[Natural, Unit("queries")] = 0
    """Most further queries of a step, in place of dropped groups."""
    extra_queries: Annotated[Natural, Unit("queries")] = 0
    """Queries that are begun beyond those of a step, under `async`. The step closes with the first to be complete, and
    the next one continues the others: see [Queries beyond the batch](modes.md#queries-beyond-the-batch)."""

    @model_validator(mode="after")
    def _oversampling_exists(self) -> "RolloutConfig":
        if self.oversampled == "keep" and not self.extra_trajectories:
            raise ValueError(
                "oversampled=keep needs extra_trajectories: without them no trajectory is left over"
            )
        return self

    @model_validator(mode="after")
    def _skipped_queries_are_replaced(self) -> "RolloutConfig":
        if self.explorations is not None and self.explorations.skip_equal and not self.replacement_queries:
            raise ValueError(
                "explorations.skip_equal=true needs replacement_queries, the most further queries of a step: a step "
                "whose queries are all skipped would train nothing"
            )
        return self

    @model_validator(mode="after")
    def _dropped_groups_are_replaced(self) -> "RolloutConfig":
        if self.filters and not self.replacement_queries:
            raise ValueError(
                "filters need replacement_queries, the most further queries of a step (a few times "
                "training.queries_per_step): a step whose groups are all left out would train nothing"
            )
        return self
