"""An owner of the training pool's ``Allocator``, in virtual time."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count as numbers

from flexmarl.actors.names import PolicyName, SlotName
from flexmarl.actors.trainer.pool.allocate import Allocator
from flexmarl.actors.trainer.pool.gangs import (
    Bind,
    Decision,
    Drop,
    Phase,
    Prefetch,
    Run,
    Suspend,
)
from flexmarl.actors.trainer.pool.slot_choice import AllocatorConfig


class Owner:
    """Carries out decisions in virtual time. A computation takes ``compute_s``, each copy ``copy_s`` seconds."""

    def __init__(
        self,
        slots: int,
        ranks: Mapping[PolicyName, int],
        config: AllocatorConfig | None = None,
        *,
        compute_s: Callable[[PolicyName], float] = lambda _: 1.0,
        copy_s: float = 0.0,
        fewest: Mapping[PolicyName, int] | None = None,
    ) -> None:
        self.allocator = Allocator([SlotName(f"slot-{n}") for n in range(slots)], ranks, config, fewest)
        self.compute_s, self.copy_s = compute_s, copy_s
        self.now = 0.0
        self.decisions: list[Decision] = []
        self.queue: list[tuple[float, int, str, PolicyName]] = []
        self._numbers = numbers()
        self._steps: Counter[PolicyName] = Counter()

    def ready(self, policy: PolicyName, count: int = 1) -> None:
        for _ in range(count):
            self.carry_out(self.allocator.ready(policy, self.now))

    def step(self, *policies: PolicyName) -> None:
        """Carries out all that is ready. Then an optimizer step of each is, which takes no time."""
        self.finish()
        self._steps.update(policies)
        for policy in policies:
            self.ready(policy)

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for one in decisions:
            self.decisions.append(one)
            match one:
                case Run(policy) if self._steps[policy]:
                    self._steps[policy] -= 1
                    self._later(0.0, "stepped", policy)
                case Run(policy):
                    self._later(self.compute_s(policy), "ended", policy)
                case Bind(policy) if self.allocator.phase(policy) is Phase.BINDING:
                    prefetched = any(isinstance(d, Prefetch) for d in self._since_out(policy))
                    self._later(0.0 if prefetched else self.copy_s, "bound", policy)
                case Suspend(policy):
                    self._later(self.copy_s, "suspended", policy)
                case Prefetch(policy):
                    self._later(self.copy_s, "prefetched", policy)
                case Drop(policy):
                    self._later(0.0, "dropped", policy)

    def _since_out(self, policy: PolicyName) -> list[Decision]:
        own = [one for one in self.decisions[:-1] if one.policy == policy]
        last = max((n for n, one in enumerate(own) if isinstance(one, Suspend | Drop)), default=-1)
        return own[last + 1 :]

    def _later(self, seconds: float, event: str, policy: PolicyName) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self._numbers), event, policy))

    def advance(self) -> Counter[PolicyName]:
        """One event. Returns the computations that began."""
        begun = len(self.decisions)
        self.now, _, event, policy = heapq.heappop(self.queue)
        if event == "stepped":
            self.carry_out(self.allocator.ended(policy, self.now, is_typical=False))
        else:
            self.carry_out(getattr(self.allocator, event)(policy, self.now))
        return Counter(one.policy for one in self.decisions[begun:] if isinstance(one, Run))

    def finish(self) -> float:
        """Carries out all that is ready; returns the time at the end."""
        while self.queue:
            self.advance()
        return self.now

    def count(self, kind: type[Decision], policy: PolicyName | None = None) -> int:
        return sum(isinstance(one, kind) and policy in (None, one.policy) for one in self.decisions)


def kinds(decisions: Iterable[Decision]) -> list[tuple[str, str]]:
    return [(type(one).__name__, one.policy) for one in decisions]
