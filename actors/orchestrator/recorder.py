"""Measures one step while it runs. Pure: every event comes with its time."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean

from ..figures import FIGURES, Numbers, StepFigures, drop_hidden_zeros
from ..messages import AgentTurns, GroupClosed, Loaded, MicroBatchTrained, PolicyStepped
from ..names import AgentName, PolicyName, Step, Version
from ..step_metrics import StepMetrics


class _AgentRecord:
    def __init__(self) -> None:
        self.figures = StepFigures("agent")
        self._lengths: list[int] = []

    def turned(self, turns: AgentTurns) -> None:
        self.figures.update(turns.figures)
        self._lengths += turns.lengths

    def numbers(self) -> Numbers:
        return self.figures.numbers() | _length_quantiles(sorted(self._lengths))


def _length_quantiles(lengths: Sequence[int]) -> Numbers:
    """The figures about the lengths of turns, which ascend."""
    if not lengths:
        return {}
    quantiles: Numbers = {
        f"turn_tokens_p{percent}": float(lengths[-(-percent * len(lengths) // 100) - 1])
        for percent in (10, 50, 90)
    }
    return {**quantiles, "turn_tokens_max": float(lengths[-1])}


class _PolicyRecord:
    def __init__(self) -> None:
        self.figures = StepFigures("policy")
        self._stepped: PolicyStepped | None = None
        self._stepped_at = 0.0

    def stepped(self, result: PolicyStepped, now: float) -> None:
        self._stepped, self._stepped_at = result, now

    @property
    def updated_at(self) -> float:
        """The end of the optimizer step: from then on the new weights are on their way."""
        return self._stepped_at if self._stepped is None else self._stepped_at - _weights_s(self._stepped)

    def applied(self, loaded: Sequence[Loaded], now: float) -> None:
        assert self._stepped is not None, "weights are published after an optimizer step"
        self.figures.add("publish_s", self._stepped.publish_s + now - self._stepped_at)
        for instance in loaded:
            for part, seconds in (
                ("pause", instance.pause_s), ("transfer", instance.transfer_s), ("load", instance.load_s)
            ):  # fmt: skip
                self.figures.update({f"{part}_mean_s": seconds, f"{part}_max_s": seconds})
            path = f"loads_by_{instance.chosen.path}" if instance.chosen is not None else ""
            if path in FIGURES["policy"]:  # paths between hosts are not counted
                self.figures.add(path, 1)
            self.figures.add("reloaded_instances", int(instance.mismatch is not None))
        if differences := sorted(chain.from_iterable(instance.differences for instance in loaded)):
            self.figures.add("probe_p99", differences[math.ceil(0.99 * len(differences)) - 1])
            self.figures.add("probe_max", differences[-1])

    def numbers(self, carried: int) -> Numbers:
        self.figures.add("carried_samples", carried)
        if self._stepped is None:
            return self.figures.numbers()
        # Means of the trainer's sums are figures already: they are not merged again.
        stats = self._stepped.stats
        means = {"samples": stats.samples, "mean_tokens": stats.tokens / stats.samples, **stats.figures}
        return drop_hidden_zeros("policy", self.figures.numbers({"samples": stats.samples}) | means)


class StepRecord:
    """Records one step of ``agents``, whose policies begin it with ``versions``.

    Times are seconds on the orchestrator's clock. ``overlaps_itself``: training overlaps the rollout of its own step;
    under ``async`` it overlaps the rollout of later steps. ``figures``: of the step; anyone may add measurements.
    ``failed``: trajectories of drawn queries.
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
        self.started = started
        self._overlaps_itself = overlaps_itself
        self._agents = {agent: _AgentRecord() for agent in agents}
        self._policies = {policy: _PolicyRecord() for policy in versions}
        self.figures = StepFigures("step")
        self._workflow: dict[str, list[float]] = {}
        self._filters = Counter[str]()
        self._waited_s = math.inf
        self._rolled_out: float | None = None
        self._last_query = ""
        self._before_tails = -math.inf
        """The time from which on each open group has waited for one trajectory alone."""
        self._busy: list[tuple[float, float]] = []
        self._moves: list[tuple[float, float]] = []
        """Times in which states of policies moved to slots or from them."""
        self._updates: list[tuple[float, float]] = []
        """Times in which optimizer steps were computed."""
        self._publishing: list[tuple[float, float]] = []
        """Times from the end of an optimizer step until all instances had applied the new weights."""
        self._generated_tokens = 0

    # ------------------------------------------------------------------ events

    def group_closed(
        self, group: GroupClosed, now: float, *, submitted: bool = False, late: bool = False
    ) -> None:
        """``submitted``: the group of a query from outside of the run. ``late``: no step has waited for it."""
        for agent, rewards in group.rewards.items():
            self._add_all(agent, "reward", rewards)
        for agent, rewards in group.turn_rewards.items():
            self._add_all(agent, "turn_reward", rewards)
        for agent, turns in group.turns.items():
            self._agents[agent].turned(turns)
        for name, counts in group.filtered.items():
            self._filters[name] += sum(counts.values())
            for agent, count in counts.items():
                self._agents[agent].figures.add("filtered_samples", count)
        for name, values in group.metrics.items():
            self._workflow.setdefault(name, []).extend(values)
        self.failed += 0 if submitted else len(group.failures)
        failed = "failed_submitted_trajectories" if submitted else "failed_trajectories"
        self._generated_tokens += group.generated_tokens
        self._waited_s = min(self._waited_s, group.waited_s)
        self.figures.update(
            {**group.figures, failed: len(group.failures), "dropped_groups": int(bool(group.dropped))}
        )
        if not late:
            self._rolled_out = now  # the last group to close sets the end of the rollout
            self._last_query = group.query
            self._before_tails = max(self._before_tails, now - group.tail_s)

    def trained(self, policy: PolicyName, result: MicroBatchTrained, version: int, now: float) -> None:
        """A micro-batch of ``policy``, then at ``version``, was trained."""
        self._busy.append((now - result.busy_s, now))
        stale = sum(count for generated_by, count in result.versions.items() if generated_by != version)
        age = max((version - generated_by for generated_by in result.versions), default=0)
        figures = self._policies[policy].figures
        figures.update({"backward_s": result.busy_s, "nonzero_advantage_share": result.nonzero_advantage})
        for merged in (figures, self.figures):
            merged.update({"stale_samples": stale, "max_staleness": age})

    def optimizer_stepped(self, policy: PolicyName, result: PolicyStepped, now: float) -> None:
        """``policy`` has trained the step, at ``now``: adds its figures, and those of its agents."""
        self._policies[policy].stepped(result, now)
        self._moves += [(now - begin, now - end) for begin, end in result.moves]
        updated = now - _weights_s(result)
        self._updates.append((updated - result.stats.figures.get("update_s", 0.0), updated))
        for agent, numbers in result.stats.by_agent.items():
            self._agents[agent].figures.update(numbers)

    def applied(self, policy: PolicyName, loaded: Sequence[Loaded], now: float) -> None:
        """All instances of ``policy`` have applied its new weights. ``loaded``: the figures of each."""
        self._publishing.append((self._policies[policy].updated_at, now))
        self._policies[policy].applied(loaded, now)

    def _add_all(self, agent: AgentName, figure: str, values: Iterable[float]) -> None:
        for value in values:
            self._agents[agent].figures.add(figure, value)

    # ------------------------------------------------------------------ results

    def rollout_s(self) -> float:
        """Seconds from the step's first turn to the end of its last trajectory.

        In ``strict`` a step starts early and its turns wait for their policies' versions: that wait belongs to the step
        before.
        """
        if self._rolled_out is None:
            return 0.0
        return max(0.0, self._rolled_out - self.started - self._waited_s)

    def tail_s(self) -> float:
        """Seconds at the end of the rollout in which each open group has waited for one trajectory alone."""
        return 0.0 if self._rolled_out is None else self._rolled_out - self._before_tails

    def overlap_s(self) -> float:
        """Seconds in which this step was both trained and rolled out; seconds shared by two policies count once."""
        rolled_out = self.started if self._rolled_out is None else self._rolled_out
        return _measure(self._busy, self.started, rolled_out)

    def swap_s(self) -> float:
        """Seconds after the rollout in which the state of a policy moved, and no policy computed."""
        return self._beyond(self._moves, [*self._busy, *self._updates])

    def weights_s(self) -> float:
        """Seconds after the rollout in which new weights were on their way, no policy computed, and no state moved."""
        return self._beyond(self._publishing, [*self._busy, *self._updates, *self._moves])

    def _beyond(self, times: Sequence[tuple[float, float]], hiding: Sequence[tuple[float, float]]) -> float:
        """Seconds after the rollout in which one of ``times`` lies, and none of ``hiding``."""
        if self._rolled_out is None or not self._overlaps_itself:
            return 0.0
        since = self._rolled_out
        return _measure([*times, *hiding], since, math.inf) - _measure(hiding, since, math.inf)

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
        return StepMetrics(
            step=self.step,
            time_s=now - run_started,
            step_s=step_s,
            rollout_s=self.rollout_s(),
            overlap_s=self.overlap_s() if self._overlaps_itself else None,
            tokens=self._generated_tokens,
            tokens_per_s=self._generated_tokens / step_s,
            versions={policy: next_versions[policy] for policy in self._policies},
            generated_by=dict(self.versions),
            last_query=self._last_query,
            figures=drop_hidden_zeros(
                "step",
                self.figures.numbers()
                | {"tail_s": self.tail_s(), "swap_s": self.swap_s(), "weights_s": self.weights_s()},
            ),
            workflow={name: fmean(values) for name, values in self._workflow.items()},
            filters=dict(self._filters),
            by_agent={agent: record.numbers() for agent, record in self._agents.items()},
            by_policy={
                policy: record.numbers(carried.get(policy, 0)) for policy, record in self._policies.items()
            },
        )


def _weights_s(result: PolicyStepped) -> float:
    """Seconds from the end of the optimizer step's computation until its weights were published."""
    return result.publish_s + result.stats.figures.get("gather_s", 0.0)


def _measure(times: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """Seconds from ``since`` to ``until`` in which one of ``times``, begins and ends, lies."""
    covered, at = 0.0, since
    for start, stop in sorted(times):
        begin, end = max(start, at), min(stop, until)
        if end > begin:
            covered, at = covered + end - begin, end
    return covered
