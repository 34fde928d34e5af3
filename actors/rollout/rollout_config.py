"""Settings of rollouts: sampling and how workflows run."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import model_validator

from ..config_base import Config, Count, Natural, NonNegative, Positive, Seconds, Share
from ..messages import Truncation
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


class SamplingConfig(Config):
    """The sampling of an agent's training turns; evaluations have a temperature of their own (``evaluation``).

    ``turn_timeout_s`` and ``on_timeout``: for this agent's turns, by default those of ``rollout``. The workflow gets a
    CallTimeout; if it does not catch that, the trajectory has passed its deadline.

    ``top_k``, ``top_p`` and ``min_p``: see ``Truncation``. ``stop``: strings that end a turn. All of these and
    ``temperature`` may differ in a turn: see ``Agent.generate``.

    ``trajectory_turns`` and ``trajectory_tokens``: the most turns and generated tokens of this agent in a trajectory;
    see ``RolloutConfig``.

    ``overlong_buffer``: the last so many tokens before ``max_new_tokens``, in which a turn's length costs reward, up to
    1 at ``max_new_tokens`` (DAPO, arXiv 2503.14476, eq. 13; there 4096 of 20480); 0 is off. An agent's reward in a
    trajectory is lowered by the cost of its longest turn before groups are compared, and is reported so; evaluations
    report the plain reward.
    """

    temperature: Positive = 1.0
    top_k: Natural = 0
    top_p: Share = 1.0
    min_p: NonNegative = 0.0
    stop: tuple[str, ...] = ()
    max_new_tokens: Count = 64
    overlong_buffer: Natural = 0
    trajectory_turns: Count | None = None
    trajectory_tokens: Count | None = None
    turn_timeout_s: Seconds | None = None
    on_timeout: OnTimeout | None = None

    @cached_property
    def own(self) -> TurnSampling:
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

    ``workers``: processes that run workflows; queries are dealt to them. ``processes``: the most that each of them has
    for ``in_process``. ``setup_timeout_s``: of the recipe's and the environment's ``setup``.

    A trajectory that raises is dropped and counted. If more than ``max_failed_share`` of the trajectories of a step
    fail, the run ends with the first traceback; those of submitted queries do not count. A trajectory or a single turn
    that takes longer than its timeout counts as failed.

    ``trajectory_turns`` and ``trajectory_tokens``: the most turns and generated tokens of all agents in a trajectory. A
    turn may have at most the tokens that are left. A workflow that asks for a turn beyond a limit gets a LimitReached.
    If it catches that, the rewards that it returns count as those of any other trajectory; if not, the trajectory
    fails.

    ``turn_retries``: a turn whose instance is lost is begun again at another one, so many times; then its trajectory
    fails.

    Stragglers: a trajectory that passed a deadline (``trajectory_timeout_s``, ``turn_timeout_s``) is cancelled.
    ``on_timeout`` ``drop`` continues with its siblings; ``replace`` starts a new one in its place, at most
    ``max_replacements`` in a group. A group with fewer than ``min_trajectories`` survivors is dropped.

    Over-provisioning: ``extra_trajectories`` more than ``training.trajectories_per_query`` are started for a query, and
    its group closes with the first to succeed. ``oversampled``: the others are stopped (``abort``), or run to their
    end, unused (``keep``: for environments that must not be interrupted; they take the engines' time). The first to
    end are the shorter ones: that biases learning.

    ``drop_zero_advantage``: if no sample of an agent in a group has an advantage, they are left out; if no sample is
    left, the whole group is dropped (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2). For algorithms that
    compare a group's rewards: ppo and reinforce_pp would learn from such samples too.
    ``replacement_queries``: a dropped group is replaced by a further query, at most so many in a step.
    """

    workers: Count = 1
    processes: Count = 4
    setup_timeout_s: Seconds = 600.0
    max_failed_share: Share = 0.25
    turn_retries: Natural = 3
    trajectory_timeout_s: Seconds = 1800.0
    trajectory_turns: Count | None = None
    trajectory_tokens: Count | None = None
    turn_timeout_s: Seconds = 600.0
    on_timeout: OnTimeout = "drop"
    max_replacements: Count = 2
    min_trajectories: Count = 1
    extra_trajectories: Natural = 0
    oversampled: Oversampled = "abort"
    drop_zero_advantage: bool = False
    replacement_queries: Natural = 0

    @model_validator(mode="after")
    def _oversampling_exists(self) -> "RolloutConfig":
        if self.oversampled == "keep" and not self.extra_trajectories:
            raise ValueError(
                "oversampled=keep needs extra_trajectories: without them no trajectory is left over"
            )
        return self

    @model_validator(mode="after")
    def _dropped_groups_are_replaced(self) -> "RolloutConfig":
        if self.drop_zero_advantage and not self.replacement_queries:
            raise ValueError(
                "drop_zero_advantage needs replacement_queries, the most further queries of a step (a few times "
                "training.queries_per_step): a step whose groups all have zero advantage would train nothing"
            )
        return self
