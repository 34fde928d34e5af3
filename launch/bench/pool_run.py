"""Steps of training on a pool of slots in virtual time: the real ``Allocator``; computations and copies only take time.

A state moves in or out beside a computation without slowing it, as a device's copy engine does.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from ...actors.names import PolicyName, SlotName
from ...actors.trainer.allocate import Allocator
from ...actors.trainer.gangs import Bind, Decision, Drop, Prefetch, Run, Suspend
from ...actors.trainer.slot_choice import AllocatorConfig
from .pool_load import Computation, Costs, StepLoad


@dataclass(frozen=True, slots=True)
class StepFigures:
    """``lost_s``: seconds, summed over the slots, in which a state moved and the slot computed nothing."""

    step_s: float
    lost_s: float
    suspensions: int


class PoolRun:
    """Steps one after the other; states stay where they are in between."""

    def __init__(self, costs: Costs, slots: int, config: AllocatorConfig | None = None) -> None:
        self._costs = costs
        ranks = {policy: cost.ranks for policy, cost in costs.items()}
        self._allocator = Allocator([SlotName(f"slot-{n}") for n in range(slots)], ranks, config)
        self._now = 0.0
        self._numbers = count()
        self._events: list[tuple[float, int, str, PolicyName]] = []
        self._left: dict[PolicyName, list[Computation]] = {}
        self._loaded: set[PolicyName] = set()
        self._places: dict[PolicyName, tuple[SlotName, ...]] = {}
        self._computing: set[PolicyName] = set()
        self._moving: Counter[PolicyName] = Counter()
        self._suspensions = 0
        self._lost_s = 0.0

    def step(self, load: StepLoad) -> StepFigures:
        """Runs all computations of ``load``."""
        started, lost_s, suspensions = self._now, self._lost_s, self._suspensions
        self._left = {policy: list(computations) for policy, computations in load.items()}
        for policy, computations in load.items():
            for one in computations:
                if not one.follows:
                    self._later(one.ready_s, "ready", policy)
        while any(self._left.values()) or self._computing:
            self._next_event()
        return StepFigures(self._now - started, self._lost_s - lost_s, self._suspensions - suspensions)

    def _next_event(self) -> None:
        now, _, event, policy = heapq.heappop(self._events)
        self._lost_s += (now - self._now) * len(self._lost_slots())
        self._now = now
        if event == "ended":
            self._computing.remove(policy)
        elif event != "ready":
            self._moving[policy] -= 1
        if event == "prefetched":
            self._loaded.add(policy)
        self._carry_out(getattr(self._allocator, event)(policy, now))
        if event == "ended" and self._left[policy] and self._left[policy][0].follows:
            self._later(0.0, "ready", policy)

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for one in decisions:
            policy, cost = one.policy, self._costs[one.policy]
            match one:
                case Run():
                    self._computing.add(policy)
                    self._later(self._left[policy].pop(0).seconds, "ended", policy)
                case Bind(_, slots):
                    load_s = 0.0 if policy in self._loaded else cost.load_s
                    self._move(cost.connect_s + load_s, "bound", policy, slots)
                case Prefetch(_, slots):
                    self._move(cost.load_s, "prefetched", policy, slots)
                case Suspend():
                    self._suspensions += 1
                    self._loaded.discard(policy)
                    self._move(cost.save_s, "suspended", policy, self._places[policy])
                case Drop(_, slots):
                    self._loaded.discard(policy)
                    self._move(0.0, "dropped", policy, slots)

    def _move(self, seconds: float, event: str, policy: PolicyName, slots: tuple[SlotName, ...]) -> None:
        self._places[policy] = slots
        self._moving[policy] += 1
        self._later(seconds, event, policy)

    def _later(self, seconds: float, event: str, policy: PolicyName) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), event, policy))

    def _lost_slots(self) -> set[SlotName]:
        moving = {slot for policy in +self._moving for slot in self._places[policy]}
        return moving - {slot for policy in self._computing for slot in self._places[policy]}
