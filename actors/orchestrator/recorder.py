"""What one step measured, gathered while it runs. Pure: the time comes in with every event."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..messages import GroupClosed, MicroBatchTrained, PolicyStepped


@dataclass(slots=True)
class StepRecord:
    """Times are seconds on the orchestrator's clock. ``overlaps_itself``: training overlaps the rollout of its own
    step; under ``async`` it is later steps that roll out meanwhile."""

    step: int
    versions: dict[str, int]
    started: float
    overlaps_itself: bool = True
    waited_s: float = math.inf
    rolled_out: float | None = None
    rewards: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    generated_tokens: int = 0
    trajectories: int = 0
    failed: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list)
    backward_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    nonzero_advantage: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    stale: int = 0
    staleness: int = 0
    dropped_groups: int = 0
    replaced_queries: int = 0
    replaced_trajectories: int = 0
    oversampled_trajectories: int = 0
    resumed_turns: int = 0
    resumed_tokens: int = 0
    zero_advantage: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    stepped: dict[str, PolicyStepped] = field(default_factory=dict)
    stepped_at: dict[str, float] = field(default_factory=dict)
    publish_s: dict[str, float] = field(default_factory=dict)

    def group_closed(self, group: GroupClosed, trajectories: int, now: float) -> None:
        for agent, rewards in group.rewards.items():
            self.rewards[agent] += rewards
        self.generated_tokens += group.generated_tokens
        self.waited_s = min(self.waited_s, group.waited_s)
        self.trajectories += trajectories
        self.failed += len(group.failures)
        self.dropped_groups += bool(group.dropped)
        self.replaced_trajectories += group.replaced
        self.oversampled_trajectories += group.oversampled
        self.resumed_turns += group.resumed_turns
        self.resumed_tokens += group.resumed_tokens
        for agent in group.zero_advantage:
            self.zero_advantage[agent] += 1
        self.rolled_out = now  # the last group to close leaves its time

    def trained(self, agent: str, result: MicroBatchTrained, version: int, now: float) -> None:
        """``version``: of the policy that was trained."""
        self.busy.append((now - result.busy_s, now))
        self.backward_s[agent] += result.busy_s
        self.nonzero_advantage[agent] += result.nonzero_advantage
        self.stale += sum(n for generated_by, n in result.versions.items() if generated_by != version)
        self.staleness = max([self.staleness, *(version - generated_by for generated_by in result.versions)])

    def optimizer_stepped(self, agent: str, result: PolicyStepped, now: float) -> None:
        self.stepped[agent] = result
        self.stepped_at[agent] = now

    def applied(self, agent: str, now: float) -> None:
        self.publish_s[agent] = self.stepped[agent].publish_s + now - self.stepped_at[agent]

    def rollout_s(self) -> float:
        """From the step's first turn to the end of its last trajectory. In ``strict`` a step starts early and its
        turns wait for their agents' versions: that wait belongs to the step before."""
        if self.rolled_out is None:
            return 0.0
        return max(0.0, self.rolled_out - self.started - self.waited_s)

    def overlap_s(self) -> float:
        """Seconds that this step's forward and backward ran while rollouts of this step still ran."""
        covered, until = 0.0, self.started
        rolled_out = self.started if self.rolled_out is None else self.rolled_out
        for start, stop in sorted(self.busy):  # a second that two policies share counts once
            begin, end = max(start, until), min(stop, rolled_out)
            if end > begin:
                covered, until = covered + end - begin, end
        return covered

    def metrics(
        self,
        next_versions: Mapping[str, int],
        carried: Mapping[str, int],
        run_started: float,
        previous_end: float,
        now: float,
    ) -> dict[str, Any]:
        """The step's line of ``metrics.jsonl``. ``next_versions``, ``carried``: as in ``StepComplete``."""
        step_s = max(now - previous_end, 1e-9)
        flat: dict[str, Any] = {
            "step": self.step,
            "time_s": now - run_started,
            "step_s": step_s,
            "rollout_s": self.rollout_s(),
            **({"overlap_s": self.overlap_s()} if self.overlaps_itself else {}),
            "tokens": self.generated_tokens,
            "tokens_per_s": self.generated_tokens / step_s,
            "versions": dict(next_versions),
            "generated_by": self.versions,
            "stale_samples": self.stale,
            "max_staleness": self.staleness,
            "failed_trajectories": self.failed,
            "replaced_trajectories": self.replaced_trajectories,
            "oversampled_trajectories": self.oversampled_trajectories,
            "resumed_turns": self.resumed_turns,
            "resumed_tokens": self.resumed_tokens,
            "dropped_groups": self.dropped_groups,
            "replaced_queries": self.replaced_queries,
        }
        for agent in self.versions:
            if self.rewards[agent]:
                flat[f"reward/{agent}"] = fmean(self.rewards[agent])
            flat[f"backward_s/{agent}"] = self.backward_s[agent]
            flat[f"zero_advantage_groups/{agent}"] = self.zero_advantage[agent]
            flat[f"carried_samples/{agent}"] = carried.get(agent, 0)
            if (stepped := self.stepped.get(agent)) is not None:
                flat |= {
                    f"samples/{agent}": stepped.samples,
                    f"mean_tokens/{agent}": stepped.tokens / stepped.samples,
                    f"nonzero_advantage_share/{agent}": self.nonzero_advantage[agent] / stepped.samples,
                    f"loss/{agent}": stepped.loss,
                    f"grad_norm/{agent}": stepped.grad_norm,
                    f"lr/{agent}": stepped.lr,
                    f"clip_fraction/{agent}": stepped.clip_fraction,
                    f"ratio_deviation/{agent}": stepped.ratio_deviation,
                    f"optimizer_s/{agent}": stepped.busy_s,
                    f"publish_s/{agent}": self.publish_s[agent],
                }
                if stepped.value_loss is not None:
                    flat[f"value_loss/{agent}"] = stepped.value_loss
                if stepped.explained_variance is not None:
                    flat[f"explained_variance/{agent}"] = stepped.explained_variance
        return flat
