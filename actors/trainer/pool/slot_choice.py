"""The choice of slots for the policies that wait, by the three rules of ``allocate.py``. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

from ...config_base import AUTO, AutoCount, Config, Count, NonNegative, Unit
from ...names import PolicyName, SlotName
from .expected_seconds import ExpectedSeconds
from .gangs import Gang, Phase, Slots
from .slot_shares import slot_shares

MOST_STATES: Final = 2
"""One state computes, and one is loaded beside it. A third would wait behind the second: it takes memory alone."""

# Loads change from step to step, and each move costs a swap.
_SMALL: Final = 0.75
"""The part of its share below which a gang moves to more slots."""
_AT_ONCE: Final = 0.05
"""The part of a computation's time that may lie between two of a policy which always has work."""
_LEFT: Final = 2.0
"""Slots are left if their policy has been without work for as many times its longest time without any."""


class AllocatorConfig(Config):
    """The rules by which policies share the slots of the training pool."""

    states_per_slot: Annotated[AutoCount, Unit("states")] = AUTO
    """Training states for which a slot has memory; the plan of a GPU counts them. With one, nothing is loaded beside a
    policy that computes. `auto`: two if [the plan](gpus.md#the-states-of-a-slot) has room for them, and on CPUs;
    else one."""
    # A guard against starving, not a share of the time: that is the part of the critical and the longest. A policy that
    # waits forces at most one swap in 16 computations of a slot: 6 % of the time if a swap takes as long as one.
    patience: Annotated[Count, Unit("computations")] = 16
    """Computations per slot that may begin while a policy waits."""
    # Work is estimated by rolling means. A policy on the edge counts as critical: too early costs one swap, too late
    # makes the step longer.
    margin: NonNegative = 0.05
    """Share of the remaining time that a policy's work may be short of, to be critical."""
    # Swaps for critical work take at most a third of the time: one after two of its lengths of computing. Without any,
    # two policies with equal work would take the slots from each other at each computation.
    hysteresis: NonNegative = 2.0
    """Time that a policy with work computes before a critical one takes its slots, as a multiple of the cost of a swap;
    and the time that a policy on fewer slots than its `ranks` loses before it moves to more."""

    @property
    def state_count(self) -> int:
        """``states_per_slot``; the most if no plan has chosen, as nothing limits them then."""
        return MOST_STATES if self.states_per_slot == AUTO else self.states_per_slot


class Occupancy:
    """Policies by slot. ``slots``, ``gangs`` and ``hosts``, that of each slot, are the allocator's own, as they are at
    each call. The order of the slots is that of the first ones."""

    def __init__(
        self,
        slots: Sequence[SlotName],
        gangs: Mapping[PolicyName, Gang],
        states_per_slot: int,
        hosts: Mapping[SlotName, str],
    ) -> None:
        self._slots, self._gangs, self._room, self._hosts = slots, gangs, states_per_slot, hosts
        self._numbers = {slot: number for number, slot in enumerate(slots)}

    def sort(self, slots: list[SlotName]) -> None:
        """Sorts ``slots``: one that comes back has its old place, and a new one the last."""
        # The rank that a slot gets follows from the order, and its host from its place in it.
        slots.sort(key=lambda slot: self._numbers.setdefault(slot, len(self._numbers)))

    def cheapest_first(
        self, slots: Iterable[SlotName], replica_size: int, cost: Callable[[SlotName], Any]
    ) -> list[SlotName]:
        """``slots`` by their cost. Neighbours that a replica may have, ``replica_size`` of them, cost as much as the
        dearest, and come before all others."""
        blocks: dict[int, list[SlotName]] = {}
        for slot in slots:
            blocks.setdefault(self._numbers[slot] // replica_size, []).append(slot)

        def key(block: tuple[int, list[SlotName]]) -> tuple[Any, ...]:
            number, members = block
            return len(members) < replica_size, max(map(cost, members)), number

        return [slot for _, members in sorted(blocks.items(), key=key) for slot in members]

    def is_far(self, gang: Gang, slot: SlotName) -> bool:
        """The state of ``gang`` would cross the network to ``slot``, from the host that it lies on."""
        return bool(gang.homes) and self._hosts.get(slot) not in gang.homes

    def holder(self, slot: SlotName) -> Gang | None:
        """Returns the gang that keeps others from computing on ``slot``; None if no gang does."""
        # A scan, not an index by slot, which would have to follow each change of a phase: there are few gangs.
        return next((g for g in self._gangs.values() if g.keeps_others_out and slot in g.slots), None)

    def states_on(self, slot: SlotName) -> int:
        """Number of training states that lie on ``slot``, those on their way in or out too."""
        return sum(slot in gang.slots for gang in self._gangs.values())

    def has_room(self, slot: SlotName) -> bool:
        """One more state has room on ``slot``."""
        return self.states_on(slot) < self._room

    def will_have_room_beside(self, slot: SlotName) -> bool:
        """A state may wait on ``slot`` once those that leave have left, beside the one that computes."""
        waiting = sum(slot in gang.slots for gang in self._gangs.values() if gang.waits)
        return waiting < self._room - 1

    def has_room_beside(self, slot: SlotName) -> bool:
        """A state may be prefetched on ``slot``, and the gang that is bound there next has room for its own."""
        return self.has_room(slot) and self.will_have_room_beside(slot)

    def earliest_free(self, gang: Gang, expected: ExpectedSeconds, now: float) -> Slots:
        """Finds slots with room for the state of a ``gang`` that waits: those whose gangs are expected to be without
        work first; of several, those of the hosts that its state lies on."""

        def free_s(slot: SlotName) -> tuple[float, bool]:
            holder = self.holder(slot)
            left_s = 0.0 if holder is None else expected.work_left(holder, now)
            return left_s, self.is_far(gang, slot)

        free = filter(self.has_room_beside, self._slots)
        first = self.cheapest_first(free, gang.replica_size, free_s)[: gang.ranks]
        # In the order of the slots: the rank that a slot gets follows from the set of slots alone.
        return tuple(slot for slot in self._slots if slot in first)


Growth: TypeAlias = tuple[Gang, int, str]
"""A gang that leaves its slots for others, their number and the reason."""


@dataclass(slots=True)
class SlotChoice:
    """The slots that waiting gangs are to get, after one event. Each event has a new choice: a plan that is kept would
    need a way back for each computation that ends early, and for each slot that is lost.

    ``waiting``: the gangs that wait, the most urgent first. ``occupied``: slots that one of them gets. ``leaving``:
    gangs that must leave their slots, with the one they leave for and the reason. ``targets``: of the waiting gangs,
    with the reason. ``divided``: gangs that leave their slots for others. ``ahead``: gangs that have done so, and have
    no work.
    ``shares``: see ``slot_shares``.
    """

    config: AllocatorConfig
    slots: Sequence[SlotName]
    gangs: Mapping[PolicyName, Gang]
    occupancy: Occupancy
    expected: ExpectedSeconds
    now: float
    critical_s: float = 0.0
    """Work of this many seconds determines the end of the step."""
    waiting: list[Gang] = field(default_factory=list)
    occupied: set[SlotName] = field(default_factory=set)
    leaving: dict[PolicyName, tuple[Gang, str]] = field(default_factory=dict)
    targets: dict[PolicyName, tuple[Slots, str]] = field(default_factory=dict)
    divided: list[Growth] = field(default_factory=list)
    ahead: list[Gang] = field(default_factory=list)
    shares: Mapping[PolicyName, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shares = slot_shares(len(self.slots), self.gangs.values())
        self.critical_s = (1 - self.config.margin) * self.expected.step_end(len(self.slots))
        self.waiting = sorted((gang for gang in self.gangs.values() if gang.waits), key=self._urgency)
        for gang in self.waiting:
            self._choose(gang)
        gangs = self.gangs.values()
        resting = (gang for gang in gangs if gang.goal and gang.phase is Phase.OUT and not gang.ready)
        self.ahead = sorted(resting, key=lambda gang: -gang.goal)
        for gang in self.ahead:
            self._choose_ahead(gang)
        if not self.waiting and not self.ahead:
            growing = (growth for gang in gangs if (growth := self._growth(gang)))
            self.divided = self._division() or [*growing][:1]

    def claim(self, gang: Gang) -> str:
        """The reason for which a waiting ``gang`` gets slots, in words."""
        assert gang.waiting_since is not None
        text = f"{gang.policy} has waited {self.now - gang.waiting_since:.3g} s with {gang.ready} ready"
        if self._is_due(gang):
            return f"{text} while {gang.passed} computations of others began"
        if self._is_critical(gang):
            return f"{text}, and its work ({self.expected.work(gang):.3g} s) determines the end of the step"
        return text

    def _urgency(self, gang: Gang) -> tuple[object, ...]:
        """Sorts the most urgent first."""
        assert gang.waiting_since is not None
        if self._is_due(gang):
            return (0, gang.waiting_since)
        return (1 if self._is_critical(gang) else 2, -self.expected.work(gang), gang.waiting_since)

    def _is_due(self, gang: Gang) -> bool:
        return gang.passed >= self.config.patience * len(self.slots)

    def _is_critical(self, gang: Gang) -> bool:
        return self.expected.work(gang) + self.expected.load(gang) >= self.critical_s

    def _choose(self, gang: Gang) -> None:
        """Gives ``gang`` a target, if it may have one: free slots, else those of gangs that have to leave for it."""
        if gang.fewest > len(self.slots):
            return  # until slots join
        # While its state is loaded, no other slots; then those first, those from which no state must leave, and those
        # to which it need not cross the network.
        allowed = gang.slots if gang.phase is Phase.PREFETCHING else self.slots
        free = [slot for slot in allowed if slot not in self.occupied and self._opens(slot)]
        occupancy = self.occupancy
        free = occupancy.cheapest_first(
            free,
            gang.replica_size,
            lambda slot: (slot not in gang.slots, occupancy.states_on(slot), occupancy.is_far(gang, slot)),
        )
        count = self._ranks_now(gang, allowed)
        target, reason = free[:count], "its slots are free"
        if len(target) < count:
            victims = self._victims(gang, allowed, count - len(target))
            if not victims and not self._is_due(gang):
                return
            for victim, why in victims:
                self.leaving[victim.policy] = (gang, f"{why}; {self.claim(gang)}")
                target += [slot for slot in victim.slots if slot in allowed]
                reason = f"{victim.policy} leaves"
            target = target[:count]  # of a gang that is due, perhaps not all: the rest follows
        self.occupied.update(target)
        if len(target) == count:
            in_order = tuple(slot for slot in self.slots if slot in target)
            self.targets[gang.policy] = (in_order, f"{self.claim(gang)}; {reason}")

    def _choose_ahead(self, gang: Gang) -> None:
        """Gives a ``gang`` without work the slots that it has left its own for."""
        free = [slot for slot in self.slots if slot not in self.occupied and self._opens(slot)]
        target = self.occupancy.cheapest_first(
            free,
            gang.replica_size,
            lambda slot: (self.occupancy.states_on(slot), self.occupancy.is_far(gang, slot)),
        )[: gang.goal]
        others_leave = any(other.phase in (Phase.SUSPENDING, Phase.DROPPING) for other in self.gangs.values())
        # As many as it was to have, unless a slot was lost meanwhile.
        if len(target) < (gang.goal if others_leave else gang.fewest):
            return
        self.occupied.update(target)
        in_order = tuple(slot for slot in self.slots if slot in target)
        self.targets[gang.policy] = in_order, "no policy has work, and this is its share of the slots"

    def _ranks_now(self, gang: Gang, allowed: Collection[SlotName]) -> int:
        """Its share, or what it has left its slots for, as far as there are slots without work: it takes none of
        policies with work for more than its fewest ranks."""
        if gang.fewest == gang.ranks:
            return gang.ranks
        idle = [slot for slot in allowed if slot not in self.occupied and self._idles(slot)]
        if gang.phase is Phase.PREFETCHING or (gang.slots and set(gang.slots) <= set(idle)):
            return len(gang.slots)
        return max(gang.fewest, min(gang.goal or self.shares[gang.policy], len(idle)))

    def _idles(self, slot: SlotName) -> bool:
        holder = self.occupancy.holder(slot)
        return holder is None or holder.policy in self.leaving or holder.starves

    def _opens(self, slot: SlotName) -> bool:
        """Nothing computes on ``slot``, or what does will leave."""
        holder = self.occupancy.holder(slot)
        return holder is None or holder.policy in self.leaving

    def _victims(self, gang: Gang, allowed: Collection[SlotName], missing: int) -> list[tuple[Gang, str]]:
        """Gangs that must leave so that ``gang`` gets ``missing`` more of the ``allowed`` slots, with the reasons.

        Empty if that can't be, unless ``gang`` is due: then those that there are.
        """

        def gain(holder: Gang) -> int:
            return sum(slot in allowed for slot in holder.slots)

        def cost(victim: tuple[Gang, str]) -> tuple[object, ...]:
            holder = victim[0]
            is_loaded_there = set(holder.slots) <= set(gang.slots)
            left_s = self.expected.running(holder, self.now)
            return (
                not holder.starves,
                not is_loaded_there,
                len(holder.slots) <= self.shares[holder.policy],
                left_s,
                abs(gain(holder) - missing),
                holder.began,
            )

        bound = (holder for holder in self.gangs.values() if holder.phase is Phase.BOUND and gain(holder))
        staying = (holder for holder in bound if holder.policy not in self.leaving)
        candidates = sorted(
            ((holder, why) for holder in staying if (why := self._reason_to_leave(holder, gang))), key=cost
        )
        # The cheapest first, not the cheapest set, which is a knapsack problem. The worst fault, a small victim beside
        # a large one that is enough, is repaired below.
        victims: list[tuple[Gang, str]] = []
        while candidates and missing > 0:
            victims.append(candidates.pop(0))
            missing -= gain(victims[-1][0])
        if missing > 0 and not self._is_due(gang):
            return []
        for victim in list(victims):  # those that a later, larger one has made needless
            if missing + gain(victim[0]) <= 0:
                victims.remove(victim)
                missing += gain(victim[0])
        return victims

    def _reason_to_leave(self, holder: Gang, gang: Gang) -> str:
        """The reason for which the bound ``holder`` is to leave for ``gang``, at the end of its computation if one
        runs. Empty if it may stay."""
        if holder.starves:
            return "no computation is ready"
        if not holder.runs:
            return ""  # else two policies that are due could swap for ever, and compute nothing
        if self._is_due(gang):
            return "it has had its turn"
        swap_s, share = self.expected.swap(holder, gang), self.shares[holder.policy]
        is_paid = holder.computed_s >= self.config.hysteresis * swap_s
        if is_paid and len(holder.slots) > share:
            return f"it has {len(holder.slots)} slots, and its share is {share}"
        if not self._is_critical(gang) or self._is_critical(holder):
            return ""
        if not is_paid or self.expected.work(holder) <= swap_s:
            return ""
        return f"it has less work ({self.expected.work(holder):.3g} s) than {gang.policy}"

    def _division(self) -> list[Growth]:
        """All gangs that have other slots than their shares, if one has clearly less and no policy has work: beside the
        rollouts a move costs no time, if they last longer than it."""
        gangs = self.gangs.values()
        if not all(gang.rests for gang in gangs) or sum(self.shares.values()) > len(self.slots):
            return []
        for short in gangs:
            now, share = len(short.slots), self.shares[short.policy]
            if now < _SMALL * share and short.longest_idle_s > self.expected.swap(short, short):
                reason = f"no policy has work, and {short.policy} has {now} slots of its share of {share}"
                return [
                    (gang, self.shares[gang.policy], reason)
                    for gang in gangs
                    if len(gang.slots) != self.shares[gang.policy]
                ]
        return []

    def _growth(self, gang: Gang) -> Growth | None:
        """A bound gang that is to leave its slots for more, their number and the reason. None if it may stay."""
        now, share = len(gang.slots), self.shares[gang.policy]
        if not gang.is_at_boundary or not gang.ready or now == gang.ranks or gang.idle_since is None:
            return None
        if self.now - gang.idle_since > _AT_ONCE * self.expected.computation(gang):
            return None  # it has waited for the samples that it has now, and others are about to get theirs
        is_short = now < _SMALL * share
        more = self._idle_beside(gang) if is_short else self._left_beside(gang)
        then = min(share if is_short else gang.ranks, now + more)
        lost_s = gang.computed_s * (1 - now / then)
        if lost_s <= self.config.hysteresis * self.expected.swap(gang, gang):
            return None
        reason = (
            f"{more} more slots are without work, and it has lost {lost_s:.3g} s on {now} of {then} ranks"
        )
        return gang, then, reason

    def _idle_beside(self, gang: Gang) -> int:
        """The number of other slots without work."""
        return sum(self._idles(slot) for slot in self.slots if slot not in gang.slots)

    def _left_beside(self, gang: Gang) -> int:
        """The number of other slots without work soon: those of policies that come back are theirs, or will be."""
        kept = 0
        for other in self.gangs.values():
            if other is not gang and not self._has_left(other, gang):
                kept += len(other.slots) if other.keeps_others_out else self.shares[other.policy]
        return max(0, len(self.slots) - len(gang.slots) - kept)

    def _has_left(self, other: Gang, gang: Gang) -> bool:
        """``other`` is expected to have no work soon. As long as ``gang`` itself was without work, before it got its
        own, says nothing: rollouts that take longer are longer for all."""
        if other.ready or other.computing or other.phase not in (Phase.BOUND, Phase.OUT):
            return False
        longest_s = max(other.longest_idle_s, gang.longest_idle_s)
        return other.idle_since is None or self.now - other.idle_since > _LEFT * longest_s


def join_names(names: Iterable[str]) -> str:
    """``slot-0, slot-1``; ``nothing`` without names."""
    return ", ".join(names) or "nothing"
