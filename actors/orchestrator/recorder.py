"""Measures one step while it runs. Pure: every event comes with its time."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from ..messages import (
    AgentShare,
    AgentTurns,
    GroupClosed,
    Loaded,
    MicroBatchTrained,
    PolicyStepped,
    PoolFigures,
)
from ..names import AgentName, PolicyName, Step, Version
from ..step_metrics import AgentMetrics, PolicyMetrics, StepMetrics


@dataclass(slots=True)
class _AgentRecord:
    rewards: list[float] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turns: AgentTurns = field(default_factory=AgentTurns)
    zero_advantage_groups: int = 0
    share: AgentShare | None = None

    def metrics(self) -> AgentMetrics:
        return AgentMetrics(
            reward=fmean(self.rewards) if self.rewards else None,
            turns=self.turns.turns,
            tokens=self.turns.tokens,
            truncated_turns=self.turns.truncated,
            zero_advantage_groups=self.zero_advantage_groups,
            **_length_quantiles(sorted(self.turns.lengths)),
            turn_reward=fmean(self.turn_rewards) if self.turn_rewards else None,
            token_share=self.share.tokens if self.share else None,
            advantage_share=self.share.advantages if self.share else None,
        )


def _length_quantiles(lengths: Sequence[int]) -> dict[str, float]:
    """The fields of ``AgentMetrics`` about the lengths of turns, which ascend."""
    if not lengths:
        return {}
    quantiles = {
        f"turn_tokens_p{percent}": lengths[-(-percent * len(lengths) // 100) - 1] for percent in (10, 50, 90)
    }
    return {**quantiles, "turn_tokens_max": lengths[-1]}


@dataclass(slots=True)
class _PolicyRecord:
    generated_by: Version
    backward_s: float = 0.0
    nonzero_advantage: int = 0
    stale: int = 0
    staleness: int = 0
    stepped: PolicyStepped | None = None
    stepped_at: float = 0.0
    publish_s: float | None = None
    loaded: Sequence[Loaded] = ()

    def trained(self, result: MicroBatchTrained, version: int) -> None:
        self.backward_s += result.busy_s
        self.nonzero_advantage += result.nonzero_advantage
        self.stale += sum(n for generated_by, n in result.versions.items() if generated_by != version)
        self.staleness = max([self.staleness, *(version - generated_by for generated_by in result.versions)])

    def applied(self, loaded: Sequence[Loaded], now: float) -> None:
        assert self.stepped is not None, "weights are published after an optimizer step"
        self.loaded = loaded
        self.publish_s = self.stepped.publish_s + now - self.stepped_at

    def metrics(self, version: Version, carried: int) -> PolicyMetrics:
        measured = PolicyMetrics(
            version=version,
            generated_by=self.generated_by,
            carried_samples=carried,
            stale_samples=self.stale,
            max_staleness=self.staleness,
            backward_s=self.backward_s,
        )
        if (stepped := self.stepped) is None:
            return measured
        pause_s = _mean_and_max([one.pause_s for one in self.loaded])
        transfer_s = _mean_and_max([one.transfer_s for one in self.loaded])
        load_s = _mean_and_max([one.load_s for one in self.loaded])
        stats = stepped.stats
        paths = Counter(one.chosen.path for one in self.loaded if one.chosen is not None)
        return replace(
            measured,
            samples=stats.samples,
            mean_tokens=stats.tokens / stats.samples,
            nonzero_advantage_share=self.nonzero_advantage / stats.samples,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            lr=stats.lr,
            clip_fraction=stats.clip_fraction,
            ratio_deviation=stats.ratio_deviation,
            entropy=stats.entropy,
            kl=stats.kl,
            advantage_mean=stats.advantage_mean,
            advantage_std=stats.advantage_std,
            unsure_tokens=stats.unsure_tokens or None,
            padding_share=stats.padding_share,
            skipped_updates=int(stats.skipped_update),
            optimizer_s=stepped.busy_s,
            publish_s=self.publish_s,
            value_loss=stats.value_loss,
            explained_variance=stats.explained_variance,
            pause_mean_s=pause_s[0],
            pause_max_s=pause_s[1],
            transfer_mean_s=transfer_s[0],
            transfer_max_s=transfer_s[1],
            loads_by_shm=paths.get("shm"),
            loads_by_cuda_ipc=paths.get("cuda_ipc"),
            load_mean_s=load_s[0],
            load_max_s=load_s[1],
            **_of_pool(stepped.pool),
        )


def _mean_and_max(seconds: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    return (fmean(seconds), max(seconds)) if seconds else (None, None)


def _of_pool(figures: PoolFigures | None) -> dict[str, Any]:
    """The fields of ``PolicyMetrics`` about a shared pool."""
    if figures is None:
        return {}
    return {
        "pool_computing_s": figures.computing_s,
        "pool_idle_s": figures.idle_s,
        "pool_swapping_s": figures.swapping_s,
        "pool_waiting_s": figures.waiting_s,
        "pool_suspended_s": figures.suspended_s,
        "suspensions": figures.suspensions,
        "swapped_mib": figures.moved_bytes / 2**20,
        "repeated_micro_batches": figures.repeated,
    }


class StepRecord:
    """Records one step of ``agents``, whose policies begin it with ``versions``.

    Times are seconds on the orchestrator's clock. ``overlaps_itself``: training overlaps the rollout of its own step;
    under ``async`` it overlaps the rollout of later steps.
    """

    def __init__(
        self,
        step: Step,
        versions: Mapping[PolicyName, Version],
        agents: Iterable[AgentName],
        started: float,
        *,
        overlaps_itself: bool = True,
    ) -> None:
        self.step = step
        self.versions = dict(versions)
        self.failed = 0
        self.failed_submitted = 0
        self.replaced_queries = 0
        self.submitted_queries = 0
        self.restarted_groups = 0
        self._started = started
        self._overlaps_itself = overlaps_itself
        self._agents = {agent: _AgentRecord() for agent in agents}
        self._policies = {policy: _PolicyRecord(version) for policy, version in versions.items()}
        self._workflow: dict[str, list[float]] = {}
        self._waited_s = math.inf
        self._rolled_out: float | None = None
        self._busy: list[tuple[float, float]] = []
        self._generated_tokens = 0
        self._dropped_groups = 0
        self._replaced_trajectories = 0
        self._oversampled_trajectories = 0
        self._limited_trajectories = 0
        self._retried_turns = 0
        self._resumed_turns = 0
        self._resumed_tokens = 0

    # ------------------------------------------------------------------ events

    def group_closed(self, group: GroupClosed, now: float, *, submitted: bool = False) -> None:
        """``submitted``: the group of a query from outside of the run."""
        for agent, rewards in group.rewards.items():
            self._agents[agent].rewards += rewards
        for agent, rewards in group.turn_rewards.items():
            self._agents[agent].turn_rewards += rewards
        for agent, turns in group.turns.items():
            self._agents[agent].turns += turns
        for name, values in group.metrics.items():
            self._workflow.setdefault(name, []).extend(values)
        for agent in group.zero_advantage:
            self._agents[agent].zero_advantage_groups += 1
        if submitted:
            self.failed_submitted += len(group.failures)
        else:
            self.failed += len(group.failures)
        self._generated_tokens += group.generated_tokens
        self._waited_s = min(self._waited_s, group.waited_s)
        self._dropped_groups += bool(group.dropped)
        self._replaced_trajectories += group.replaced
        self._oversampled_trajectories += group.oversampled
        self._limited_trajectories += group.limited
        self._retried_turns += group.retried_turns
        self._resumed_turns += group.resumed_turns
        self._resumed_tokens += group.resumed_tokens
        self._rolled_out = now  # the last group to close sets the end of the rollout

    def trained(self, policy: PolicyName, result: MicroBatchTrained, version: int, now: float) -> None:
        """A micro-batch of ``policy``, then at ``version``, was trained."""
        self._busy.append((now - result.busy_s, now))
        self._policies[policy].trained(result, version)

    def optimizer_stepped(self, policy: PolicyName, result: PolicyStepped, now: float) -> None:
        record = self._policies[policy]
        record.stepped, record.stepped_at = result, now
        for agent, share in result.stats.agent_shares.items():
            self._agents[agent].share = share

    def applied(self, policy: PolicyName, loaded: Sequence[Loaded], now: float) -> None:
        """All instances of ``policy`` have applied its new weights. ``loaded``: the figures of each."""
        self._policies[policy].applied(loaded, now)

    # ------------------------------------------------------------------ results

    def rollout_s(self) -> float:
        """Seconds from the step's first turn to the end of its last trajectory.

        In ``strict`` a step starts early and its turns wait for their policies' versions: that wait belongs to the step
        before.
        """
        if self._rolled_out is None:
            return 0.0
        return max(0.0, self._rolled_out - self._started - self._waited_s)

    def overlap_s(self) -> float:
        """Seconds in which this step was both trained and rolled out; seconds shared by two policies count once."""
        covered, until = 0.0, self._started
        rolled_out = self._started if self._rolled_out is None else self._rolled_out
        for start, stop in sorted(self._busy):
            begin, end = max(start, until), min(stop, rolled_out)
            if end > begin:
                covered, until = covered + end - begin, end
        return covered

    def metrics(
        self,
        next_versions: Mapping[PolicyName, Version],
        carried: Mapping[PolicyName, int],
        run_started: float,
        previous_end: float,
        now: float,
    ) -> StepMetrics:
        """The metrics of the complete step. ``next_versions``, ``carried``: as in ``StepComplete``."""
        step_s = max(now - previous_end, 1e-9)
        policies = self._policies.values()
        return StepMetrics(
            step=self.step,
            time_s=now - run_started,
            step_s=step_s,
            rollout_s=self.rollout_s(),
            overlap_s=self.overlap_s() if self._overlaps_itself else None,
            tokens=self._generated_tokens,
            tokens_per_s=self._generated_tokens / step_s,
            stale_samples=sum(policy.stale for policy in policies),
            max_staleness=max((policy.staleness for policy in policies), default=0),
            failed_trajectories=self.failed,
            failed_submitted_trajectories=self.failed_submitted,
            replaced_trajectories=self._replaced_trajectories,
            oversampled_trajectories=self._oversampled_trajectories,
            limited_trajectories=self._limited_trajectories,
            retried_turns=self._retried_turns,
            resumed_turns=self._resumed_turns,
            resumed_tokens=self._resumed_tokens,
            dropped_groups=self._dropped_groups,
            replaced_queries=self.replaced_queries,
            submitted_queries=self.submitted_queries,
            restarted_groups=self.restarted_groups,
            workflow={name: fmean(values) for name, values in self._workflow.items()},
            by_agent={agent: record.metrics() for agent, record in self._agents.items()},
            by_policy={
                policy: record.metrics(next_versions[policy], carried.get(policy, 0))
                for policy, record in self._policies.items()
            },
        )
