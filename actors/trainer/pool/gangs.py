"""Gangs of the training pool: a policy's ranks, which hold slots together, and the decisions about them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from ...errors import ProtocolViolation
from ...names import PolicyName, SlotName
from ...rolling_mean import rolling_mean

Slots: TypeAlias = tuple[SlotName, ...]
"""Slots of a gang; rank ``r`` is on the slot with index ``r``."""


@dataclass(frozen=True, slots=True)
class Bind:
    """The policy is to compute on ``slots``: load its state, if no Prefetch has, and connect its ranks. Answered by
    ``Allocator.bound``."""

    policy: PolicyName
    slots: Slots
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """The bound policy is to begin its next computation. Answered by ``Allocator.ended``."""

    policy: PolicyName
    reason: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """The bound policy is to leave its slots; its state moves out. Answered by ``Allocator.suspended``.

    If a slot has room for several states, a Bind of another policy on it may follow in the same answer. The owner may
    let the two overlap, or carry them out one after the other.
    """

    policy: PolicyName
    reason: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The state of the policy is to be loaded on ``slots``, beside the state that computes there. Answered by
    ``Allocator.prefetched``."""

    policy: PolicyName
    slots: Slots
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Memory of the policy on ``slots`` is to be freed, and no state moves out: it was prefetched only, or another of
    the gang's slots was lost. Answered by ``Allocator.dropped``."""

    policy: PolicyName
    slots: Slots
    reason: str


Decision: TypeAlias = Bind | Run | Suspend | Prefetch | Drop


class Phase(Enum):
    """A gang's way: out, (prefetching, prefetched,) binding, bound, suspending, out. The value is shown to people."""

    OUT = "out"
    PREFETCHING = "prefetching"
    PREFETCHED = "prefetched"
    BINDING = "binding"
    BOUND = "bound"
    SUSPENDING = "suspending"
    DROPPING = "dropping"


# A prefetched gang waits as well: another one computes on its slots.
_WAITING: Final = (Phase.OUT, Phase.PREFETCHING, Phase.PREFETCHED)


@dataclass(slots=True)
class GangSeconds:
    """Seconds that a policy has spent, by what it did; each moment counts once.

    ``computing``: a computation ran. ``idle``: bound, and no computation was ready. ``swapping``: being bound or
    suspended. ``waiting``: a computation was ready, and the policy had no slots. ``out``: suspended without work.
    ``computing_on_slots``: ``computing`` on each slot, the sum over its slots.
    """

    computing: float = 0.0
    idle: float = 0.0
    swapping: float = 0.0
    waiting: float = 0.0
    out: float = 0.0
    computing_on_slots: float = 0.0


@dataclass(slots=True)
class Gang:
    """The state of one policy in the pool.

    ``ranks``: at most, ``fewest``: at least; while it has slots, it has as many ranks as slots. ``replica_size``:
    ranks of a replica, whose slots are to be neighbours.
    ``ready``: computations that may run and don't yet. ``runs``: begun since the gang was bound last.
    ``load``: seconds of its computations times the slots that they kept busy; those long ago count less.
    ``goal``: slots that it has left its own for; 0 if it has not.
    ``waiting_since``: a computation is ready since then, and the gang has no slots. ``passed``: computations of others
    that began meanwhile. ``keeps_others_out``: no other gang may compute on its slots. ``homes``: the hosts that its
    state lies on while it has no slots.
    """

    policy: PolicyName
    ranks: int
    fewest: int
    replica_size: int = 1
    phase: Phase = Phase.OUT
    slots: Slots = ()
    # Not a function of the phase: a gang that is dropped keeps others out if it was bound before.
    keeps_others_out: bool = False
    was_prefetched: bool = False
    homes: frozenset[str] = frozenset()
    ready: int = 0
    computing: bool = False
    runs: int = 0
    waiting_since: float | None = None
    passed: int = 0
    seconds: GangSeconds = field(default_factory=GangSeconds)
    began: float = 0.0
    """The time at which the phase began; of a computing gang, the computation."""
    # Rolling means; None before the first. Of the last run alone they would follow one slow computation.
    compute_s: float | None = None
    load_s: float | None = None
    save_s: float | None = None
    computed_s: float = 0.0
    """Seconds of computing since it was bound last."""
    idle_since: float | None = None
    """The end of its last computation."""
    longest_idle_s: float = 0.0
    """The longest time so far from the end of a computation until another was ready."""
    has_stepped: bool = True
    """Its last computation was an optimizer step: it has no gradient."""
    computed_on: int = 0
    """Slots on which ``compute_s`` is right; 0 before the first computation."""
    load: float = 0.0
    goal: int = 0

    @property
    def waits(self) -> bool:
        """Work is ready, and the gang may be given slots."""
        return self.ready > 0 and self.phase in _WAITING

    @property
    def is_at_boundary(self) -> bool:
        """Bound, between two computations."""
        return self.phase is Phase.BOUND and not self.computing

    @property
    def starves(self) -> bool:
        """Bound, with no computation ready."""
        return self.is_at_boundary and not self.ready

    @property
    def rests(self) -> bool:
        """Between two steps, with no computation ready: its state may move, and nothing waits for it."""
        return self.has_stepped and not self.ready and (self.phase is Phase.OUT or self.is_at_boundary)

    @property
    def width(self) -> int:
        """Slots for which its expected seconds are right."""
        return self.computed_on or self.ranks

    def note_ready(self, now: float) -> None:
        """One more computation is ready."""
        if self.idle_since is not None and not self.ready and not self.computing:
            self.longest_idle_s = max(self.longest_idle_s, now - self.idle_since)
        self.ready += 1

    def measure(self, seconds: float, even_ranks: float) -> None:
        """A computation of ``seconds``, as long as others, has ended, which kept ``even_ranks`` busy all the time."""
        self.compute_s, self.computed_on = rolling_mean(self.compute_s, seconds), len(self.slots)
        # The other slots have waited for its longest sample: further ones would not have made it shorter.
        self.load += seconds * min(len(self.slots), even_ranks)

    def expect_slots(self, count: int) -> None:
        """It is bound to ``count`` slots: on others than before its computations take another time."""
        if self.compute_s is not None:
            self.compute_s *= self.computed_on / count
            self.computed_on = count

    def require(self, event: str, *phases: Phase, computing: bool = False) -> None:
        """Raises ProtocolViolation if ``event`` can't happen now."""
        # Not ignored: the owner and the allocator would differ about the slots from then on.
        if self.phase not in phases or self.computing != computing:
            now = "computing" if self.computing else self.phase.value
            raise ProtocolViolation(f"policy {self.policy} was reported {event}, but it is {now}")

    def enter(self, phase: Phase, now: float, slots: Slots = ()) -> None:
        """``phase`` begins at ``now`` (seconds), on ``slots``."""
        self.phase, self.slots, self.began = phase, slots, now
        self.keeps_others_out = phase in (Phase.BINDING, Phase.BOUND)

    def pass_time(self, seconds: float) -> None:
        """Counts ``seconds`` in which nothing has changed."""
        # Each moment counts once, so that the first five add up to the run's time: a swap with work ready is a swap.
        if self.computing:
            self.seconds.computing += seconds
            self.seconds.computing_on_slots += seconds * len(self.slots)
        elif self.phase is Phase.BOUND:
            self.seconds.idle += seconds
        elif self.phase not in _WAITING:
            self.seconds.swapping += seconds
        elif self.ready:
            self.seconds.waiting += seconds
        else:
            self.seconds.out += seconds
