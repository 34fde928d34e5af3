"""The numbers that the progress display shows, smoothed and summed over the steps. No I/O."""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ....actors.figures import Numbers
from ....actors.names import AgentName, PolicyName
from ....actors.rolling_mean import rolling_mean
from ....actors.step_metrics import StepMetrics
from ....core.base.texts import printable
from ..formatting import number
from .rate_limit import Clock

SMOOTHING_STEPS = 20  # shown numbers are exponential means over about this many steps
_RECENT_STEPS = 50
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 12


def one_line(text: str) -> str:
    """``text`` without line breaks, and with its control characters shown: names and errors are arbitrary text."""
    return " ".join(printable(text).split())


@dataclass(frozen=True, slots=True)
class Phase:
    """The run's present work in words. ``done``, ``total``: parts of it, None if they are not counted."""

    text: str
    done: int | None
    total: int | None

    def __str__(self) -> str:
        if self.done is None:
            return self.text
        return f"{self.text} {self.done}" + ("" if self.total is None else f"/{self.total}")


class Mean:
    """An exponential mean. ``value``: None before the first number."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float | None) -> None:
        """Values that are missing or not finite leave the mean as it is."""
        if (finite := number(value)) is not None:
            self.value = rolling_mean(self.value, finite, newest_share=2 / (SMOOTHING_STEPS + 1))


class Trail:
    """A curve of any length in at most 2 * ``_SPARK_WIDTH`` numbers: when full, neighbours are averaged."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._stride, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        """Appends a finite number. A full trail loses half of its resolution, never a part of the curve."""
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._stride:
            self._values.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._values) == 2 * _SPARK_WIDTH:
            self._values = _average_pairs(self._values)
            self._stride *= 2

    def spark(self) -> str:
        """The curve in block characters, from its lowest to its highest value."""
        stored = len(self._values)
        width = min(stored, _SPARK_WIDTH)
        values = [self._values[(index + 1) * stored // width - 1] for index in range(width)]
        if not values:
            return ""
        low, span = min(values), max(values) - min(values)
        top = len(_SPARKS) - 1
        return "".join(_SPARKS[round(top * (value - low) / span) if span else 0] for value in values)


def _average_pairs(values: Sequence[float]) -> list[float]:
    """The means of neighbouring pairs; a last value without a partner is kept."""
    return [
        sum(values[index : index + 2]) / len(values[index : index + 2]) for index in range(0, len(values), 2)
    ]


@dataclass(slots=True)
class AgentState:
    """One agent's smoothed reward, and its curve."""

    policy: PolicyName
    reward: Mean = field(default_factory=Mean)
    trail: Trail = field(default_factory=Trail)

    def record(self, figures: Numbers) -> None:
        """Takes the agent's figures of one step: the reward of its turns if single turns are rewarded, which it learns
        from. A reward that is missing or not finite changes nothing."""
        reward = number(figures.get("turn_reward", figures.get("reward")))
        if reward is not None:
            self.reward.add(reward)
            self.trail.add(reward)


@dataclass(slots=True)
class PolicyState:
    """One policy's figures. ``version``, ``samples``: None before its first step. ``max_staleness``: in versions."""

    version: int | None = None
    samples: int | None = None
    max_staleness: int = 0
    loss: Mean = field(default_factory=Mean)
    grad_norm: Mean = field(default_factory=Mean)

    def record(self, figures: Numbers) -> None:
        """Takes the policy's figures of one step. Those that are missing leave the last ones on show."""
        self.max_staleness = int(figures.get("max_staleness", 0))
        if (samples := figures.get("samples")) is not None:
            self.samples = int(samples)
        self.loss.add(figures.get("loss"))
        self.grad_norm.add(figures.get("grad_norm"))


@dataclass(slots=True)
class PoolState:
    """Shares of the policies' time in a shared pool, 0 to 1. ``swapping``: of the time on their slots or on their way.
    ``waiting``: of all their time; others had the slots."""

    swapping: Mean = field(default_factory=Mean)
    waiting: Mean = field(default_factory=Mean)

    def record(self, policies: Iterable[Numbers]) -> None:
        """Takes the seconds of all policies in one step. Policies outside a shared pool are left out."""
        pool_policies = [figures for figures in policies if "pool_computing_s" in figures]
        computing, idle, swapping, waiting, suspended = (
            sum(figures.get(f"pool_{kind}_s", 0.0) for figures in pool_policies)
            for kind in ("computing", "idle", "swapping", "waiting", "suspended")
        )
        if (on_slots := computing + idle + swapping) > 0:
            self.swapping.add(swapping / on_slots)
            self.waiting.add(waiting / (on_slots + waiting + suspended))

    def __str__(self) -> str:
        """Empty if the pool is not shared."""
        if self.swapping.value is None or self.waiting.value is None:
            return ""
        return f"pool swapping {self.swapping.value:.0%}, waiting {self.waiting.value:.0%}"


class ProgressState:
    """One run's numbers. ``agents``: the policy of each. ``changed_s``: ``elapsed_s`` at the end of the last step or
    phase."""

    def __init__(
        self,
        name: str,
        mode: str,
        total_steps: int,
        agents: Mapping[AgentName, PolicyName],
        clock: Clock = time.monotonic,
    ) -> None:
        self.name, self.mode, self.total_steps = name, mode, total_steps
        self.agents = {agent: AgentState(policy) for agent, policy in agents.items()}
        self.policies = {policy: PolicyState() for policy in agents.values()}
        self.pool = PoolState()
        self.step = 0
        self.phase: Phase | None = None
        self.failed = 0
        self.tokens_per_s, self.overlap_s, self.step_s = Mean(), Mean(), Mean()
        self._clock = clock
        self._started_s = clock()
        self.changed_s = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)

    def record(self, metrics: StepMetrics) -> None:
        """Takes the figures of a complete step, once per step and in their order. It ends the phase."""
        self.end_phase()
        self.step = metrics.step
        self._recent.append((self._clock(), self.step))
        self.failed += int(metrics.figures.get("failed_trajectories", 0))
        self.tokens_per_s.add(metrics.tokens_per_s)
        self.overlap_s.add(metrics.overlap_s)
        self.step_s.add(metrics.step_s)
        for agent in self.agents.keys() & metrics.by_agent.keys():
            self.agents[agent].record(metrics.by_agent[agent])
        self.pool.record(metrics.by_policy.values())
        for policy in self.policies.keys() & metrics.by_policy.keys():
            self.policies[policy].record(metrics.by_policy[policy])
        for policy in self.policies.keys() & metrics.versions.keys():
            self.policies[policy].version = metrics.versions[policy]

    def end_phase(self) -> None:
        """Forgets the present phase, if there is one, and notes the time of the change."""
        self.phase = None
        self.changed_s = self.elapsed_s()

    def elapsed_s(self) -> float:
        """Seconds since the display was made; a resumed run begins at 0 again."""
        return self._clock() - self._started_s

    def pace_s(self) -> float | None:
        """Seconds per step over the last 50, with all that happens between them; None until two steps have finished."""
        if len(self._recent) < 2:
            return None
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        return (last_s - first_s) / (last - first) if last > first else None

    def remaining_s(self) -> float | None:
        """Seconds to the last step at the pace of the last 50; None until two steps have finished."""
        step_s = self.pace_s()
        return None if step_s is None else max(0, self.total_steps - self.step) * step_s
