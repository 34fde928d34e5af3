"""The decisions of the training pool: which policies hold which slots. Pure: events with their times in, decisions out.

There are fewer slots than the policies need all at once. A policy's gang, all its ranks, is bound when a computation is
ready, kept while it has work, and suspended only for another policy that waits. Three rules, the strongest first:

1. **Due.** A gang that has waited while ``patience`` computations per slot began is due. The one that has waited
   longest takes the next slots at which a computation ends, so that small gangs don't overtake a large one for ever.
   A gang that was bound runs at least one computation, and a claim to slots waits for nothing but computations and
   copies under way: there is no deadlock, and each ready computation runs after a bounded number of others.
2. **Critical.** Work that is ready can't end before ``max(all work / slots, the longest policy's work)``. A waiting
   policy whose own work fills that time, up to ``margin``, takes the slots of policies with less work, between two
   of their computations (zero laxity first, for a common deadline: McNaughton 1959, Lee 1994). It does so only if the
   policy that leaves has computed for ``hysteresis`` times the cost of the swap, and has more work left than that.
3. **Longest.** The others are bound to free slots and to those of policies without work, the most ready work first.

A policy that waits is prefetched to the slots that are expected to be free first, if they have room for its state
beside the one that computes. Work is the number of ready computations times the mean time of the policy's last ones.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..config_base import Config, Count, NonNegative
from ..errors import GangTooLarge, ProtocolViolation
from ..names import PolicyName, SlotName
from .expected_seconds import ExpectedSeconds
from .gangs import (
    Bind,
    Decision,
    Drop,
    Gang,
    GangSeconds,
    Phase,
    Prefetch,
    Run,
    Slots,
    Suspend,
    rolling_mean,
)


class AllocatorConfig(Config):
    """The rules by which policies share the slots of the training pool.

    ``states_per_slot``: training states for which a slot has memory; with one, nothing is prefetched. ``patience``:
    computations per slot that may begin while a policy waits. ``margin``: share of the remaining time that a policy's
    work may be short of, to be critical. ``hysteresis``: a policy that has work computes for so many times the cost of
    a swap before a critical one takes its slots.
    """

    states_per_slot: Count = 2
    patience: Count = 16
    margin: NonNegative = 0.05
    hysteresis: NonNegative = 2.0


@dataclass(slots=True)
class _Round:
    """Decisions of one event. ``taken``: slots that a waiting gang is to get. ``leaving``: gangs that must leave their
    slots, with the one they leave for and the reason. ``targets``: of the waiting gangs, with the reason."""

    taken: set[SlotName] = field(default_factory=set)
    leaving: dict[PolicyName, tuple[Gang, str]] = field(default_factory=dict)
    targets: dict[PolicyName, tuple[Slots, str]] = field(default_factory=dict)


class Allocator:
    """Decides for policies of ``ranks`` on ``slots``.

    Each method but the readers reports an event at ``now``, in seconds, and returns the decisions to carry out, in
    order. All raise ProtocolViolation, and change nothing, for an event that can't happen.
    """

    def __init__(
        self,
        slots: Sequence[SlotName],
        ranks: Mapping[PolicyName, int],
        config: AllocatorConfig | None = None,
    ) -> None:
        """Raises GangTooLarge."""
        for policy, count in ranks.items():
            if count > len(slots):
                raise GangTooLarge(policy, count, len(slots))
        self._config = config or AllocatorConfig()
        self._slots = list(slots)
        self._gangs = {policy: Gang(policy, count) for policy, count in ranks.items()}
        self._expected = ExpectedSeconds(self._gangs.values())
        self._now: float | None = None
        self._critical_s = 0.0  # work of this many seconds determines the end of the step

    # ------------------------------------------------------------------ events

    def ready(self, policy: PolicyName, now: float) -> list[Decision]:
        """One more computation of ``policy`` may run."""
        gang = self._gang(policy)
        self._pass_time(now)
        gang.ready += 1
        if gang.waiting_since is None and gang.phase not in (Phase.BINDING, Phase.BOUND):
            gang.waiting_since = now
        return self._decide(now)

    def prefetched(self, policy: PolicyName, now: float) -> list[Decision]:
        """A Prefetch was carried out."""
        gang = self._gang(policy)
        gang.require("prefetched", Phase.PREFETCHING)
        self._pass_time(now)
        gang.load_s = rolling_mean(gang.load_s, now - gang.began)
        gang.enter(Phase.PREFETCHED, now, gang.slots)
        return self._decide(now)

    def bound(self, policy: PolicyName, now: float) -> list[Decision]:
        """A Bind was carried out: the policy can compute."""
        gang = self._gang(policy)
        gang.require("bound", Phase.BINDING)
        self._pass_time(now)
        if not gang.was_prefetched:
            gang.load_s = rolling_mean(gang.load_s, now - gang.began)
        gang.enter(Phase.BOUND, now, gang.slots)
        return self._decide(now)

    def ended(self, policy: PolicyName, now: float) -> list[Decision]:
        """The running computation ended."""
        gang = self._gang(policy)
        gang.require("ended", Phase.BOUND, computing=True)
        self._pass_time(now)
        gang.compute_s = rolling_mean(gang.compute_s, now - gang.began)
        gang.computed_s += now - gang.began
        gang.computing = False
        return self._decide(now)

    def suspended(self, policy: PolicyName, now: float) -> list[Decision]:
        """A Suspend was carried out: the state is out, its memory on the slots is free."""
        gang = self._gang(policy)
        gang.require("suspended", Phase.SUSPENDING)
        self._pass_time(now)
        gang.save_s = rolling_mean(gang.save_s, now - gang.began)
        gang.enter(Phase.OUT, now)
        return self._decide(now)

    def dropped(self, policy: PolicyName, now: float) -> list[Decision]:
        """A Drop was carried out."""
        gang = self._gang(policy)
        gang.require("dropped", Phase.DROPPING)
        self._pass_time(now)
        gang.enter(Phase.OUT, now)
        return self._decide(now)

    def slot_lost(self, slot: SlotName, now: float) -> list[Decision]:
        """A slot is gone, and so is all that was on it. Of each gang that was there, the other slots are dropped.

        A computation that ran there has not ended. If it is to be computed again, the owner reports it as ``ready``.
        """
        if slot not in self._slots:
            raise ProtocolViolation(f"slot {slot} was reported lost, but the pool has {_listed(self._slots)}")
        self._pass_time(now)
        self._slots.remove(slot)
        decisions: list[Decision] = []
        for gang in self._gangs.values():
            if slot in gang.slots:
                decisions += self._abandon(gang, slot, now)
        return decisions + self._decide(now)

    def slot_joined(self, slot: SlotName, now: float) -> list[Decision]:
        """An empty slot is there, a new one or one that was lost."""
        if slot in self._slots:
            raise ProtocolViolation(f"slot {slot} was reported joined, but it is in the pool")
        self._pass_time(now)
        self._slots.append(slot)
        return self._decide(now)

    # ------------------------------------------------------------------ readers

    def phase(self, policy: PolicyName) -> Phase:
        return self._gang(policy).phase

    def seconds(self, policy: PolicyName) -> GangSeconds:
        """Seconds until the last event, by what the policy did."""
        return self._gang(policy).seconds

    # ------------------------------------------------------------------ the rules

    def _decide(self, now: float) -> list[Decision]:
        """All decisions that follow from the present state."""
        self._critical_s = (1 - self._config.margin) * self._expected.step_end(len(self._slots))
        waiting = sorted((gang for gang in self._gangs.values() if gang.waits), key=self._urgency)
        chosen = _Round()
        for gang in waiting:
            self._choose(gang, chosen, now)
        decisions = [*self._suspend(chosen, now), *self._bind(waiting, chosen, now)]
        return decisions + self._run(chosen, now) + self._prefetch(waiting, chosen, now)

    def _urgency(self, gang: Gang) -> tuple[object, ...]:
        """Sorts the most urgent first."""
        assert gang.waiting_since is not None
        if self._is_due(gang):
            return (0, gang.waiting_since)
        return (1 if self._is_critical(gang) else 2, -self._expected.work(gang), gang.waiting_since)

    def _is_due(self, gang: Gang) -> bool:
        return gang.passed >= self._config.patience * len(self._slots)

    def _is_critical(self, gang: Gang) -> bool:
        return self._expected.work(gang) + self._expected.load(gang) >= self._critical_s

    def _choose(self, gang: Gang, chosen: _Round, now: float) -> None:
        """Gives ``gang`` a target, if it may have one: free slots, else those of gangs that have to leave for it."""
        if gang.ranks > len(self._slots):
            return  # until slots join
        # While its state is loaded, no other slots; then those first, and those from which no state must leave.
        allowed = gang.slots if gang.phase is Phase.PREFETCHING else self._slots
        free = [slot for slot in allowed if slot not in chosen.taken and self._opens(slot, chosen)]
        free.sort(key=lambda slot: (slot not in gang.slots, self._states_on(slot)))
        target, reason = free[: gang.ranks], "its slots are free"
        if len(target) < gang.ranks:
            victims = self._victims(gang, chosen, allowed, gang.ranks - len(target), now)
            if not victims and not self._is_due(gang):
                return
            for victim, why in victims:
                chosen.leaving[victim.policy] = (gang, f"{why}; {self._claim(gang, now)}")
                target += [slot for slot in victim.slots if slot in allowed]
                reason = f"{victim.policy} leaves"
            target = target[: gang.ranks]  # of a gang that is due, perhaps not all: the rest follows
        chosen.taken.update(target)
        if len(target) == gang.ranks:
            in_order = tuple(slot for slot in self._slots if slot in target)
            chosen.targets[gang.policy] = (in_order, f"{self._claim(gang, now)}; {reason}")

    def _opens(self, slot: SlotName, chosen: _Round) -> bool:
        """Nothing computes on ``slot``, or what does will leave."""
        holder = self._holder(slot)
        return holder is None or holder.policy in chosen.leaving

    def _victims(
        self, gang: Gang, chosen: _Round, allowed: Collection[SlotName], missing: int, now: float
    ) -> list[tuple[Gang, str]]:
        """Gangs that must leave so that ``gang`` gets ``missing`` more of the ``allowed`` slots, with the reasons.

        Empty if that can't be, unless ``gang`` is due: then those that there are.
        """

        def gain(holder: Gang) -> int:
            return sum(slot in allowed for slot in holder.slots)

        def cost(victim: tuple[Gang, str]) -> tuple[object, ...]:
            one = victim[0]
            is_loaded_there = set(one.slots) <= set(gang.slots)
            left_s = self._expected.running(one, now)
            return (not one.starves, not is_loaded_there, left_s, abs(gain(one) - missing), one.began)

        bound = (one for one in self._gangs.values() if one.phase is Phase.BOUND and gain(one))
        staying = (one for one in bound if one.policy not in chosen.leaving)
        found = sorted(((one, why) for one in staying if (why := self._reason_to_leave(one, gang))), key=cost)
        victims: list[tuple[Gang, str]] = []
        while found and missing > 0:
            victims.append(found.pop(0))
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
            return ""
        if self._is_due(gang):
            return "it has had its turn"
        if not self._is_critical(gang) or self._is_critical(holder):
            return ""
        swap_s = self._expected.swap(holder, gang)
        if holder.computed_s < self._config.hysteresis * swap_s or self._expected.work(holder) <= swap_s:
            return ""
        return f"it has less work ({self._expected.work(holder):.3g} s) than {gang.policy}"

    def _claim(self, gang: Gang, now: float) -> str:
        """The reason for which a waiting ``gang`` gets slots, in words."""
        assert gang.waiting_since is not None
        text = f"{gang.policy} has waited {now - gang.waiting_since:.3g} s with {gang.ready} ready"
        if self._is_due(gang):
            return f"{text} while {gang.passed} computations of others began"
        if self._is_critical(gang):
            return f"{text}, and its work ({self._expected.work(gang):.3g} s) determines the end of the step"
        return text

    # ------------------------------------------------------------------ decisions and their bookkeeping

    def _suspend(self, chosen: _Round, now: float) -> Iterable[Decision]:
        for policy, (successor, reason) in chosen.leaving.items():
            gang = self._gangs[policy]
            if gang.is_at_boundary and (gang.starves or not self._will_be_loaded(successor, chosen)):
                gang.enter(Phase.SUSPENDING, now, gang.slots)
                gang.waiting_since = now if gang.ready else None
                yield Suspend(policy, reason)

    def _will_be_loaded(self, gang: Gang, chosen: _Round) -> bool:
        """The state of a waiting ``gang`` comes to its target in a while, beside those that compute there."""
        if gang.policy not in chosen.targets:
            return True  # it is due, and not all slots of its target are known yet
        target, _ = chosen.targets[gang.policy]
        if gang.phase is not Phase.OUT:
            return gang.phase is Phase.PREFETCHING or set(gang.slots) != set(target)
        return all(self._states_that_wait(slot) < self._config.states_per_slot - 1 for slot in target)

    def _bind(self, waiting: Iterable[Gang], chosen: _Round, now: float) -> Iterable[Decision]:
        for gang in waiting:
            if gang.policy not in chosen.targets:
                continue
            slots, reason = chosen.targets[gang.policy]
            if gang.phase is Phase.PREFETCHED and set(gang.slots) != set(slots):
                yield self._drop(gang, gang.slots, f"other slots are free earlier: {_listed(slots)}", now)
                continue
            is_loaded = gang.phase is Phase.PREFETCHED
            if any(self._holder(slot) is not None for slot in slots) or gang.phase is Phase.PREFETCHING:
                continue
            if is_loaded or all(self._states_on(slot) < self._config.states_per_slot for slot in slots):
                gang.was_prefetched = is_loaded
                gang.enter(Phase.BINDING, now, gang.slots if is_loaded else slots)
                gang.waiting_since, gang.passed, gang.runs, gang.computed_s = None, 0, 0, 0.0
                yield Bind(gang.policy, gang.slots, reason)

    def _run(self, chosen: _Round, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for gang in self._gangs.values():
            if gang.is_at_boundary and gang.ready:
                decisions.append(Run(gang.policy, f"{gang.ready} ready"))
                gang.ready -= 1
                gang.runs += 1
                gang.computing, gang.began = True, now
                for other in self._gangs.values():
                    other.passed += other.waiting_since is not None
        return decisions

    def _prefetch(self, waiting: Iterable[Gang], chosen: _Round, now: float) -> list[Decision]:
        """Begins to load waiting gangs beside those that compute."""
        decisions: list[Decision] = []
        for gang in waiting:
            if gang.phase is not Phase.OUT or gang.ranks > len(self._slots):
                continue
            if gang.policy in chosen.targets:
                slots, reason = chosen.targets[gang.policy]
            else:
                slots = self._earliest_free(gang.ranks, now)
                reason = f"{self._claim(gang, now)}; these slots are expected to be free first"
            if len(slots) == gang.ranks and all(map(self._has_room_beside, slots)):
                gang.enter(Phase.PREFETCHING, now, slots)
                decisions.append(Prefetch(gang.policy, slots, reason))
        return decisions

    def _earliest_free(self, count: int, now: float) -> Slots:
        """Finds slots with room for a state that waits: those whose gangs are expected to be without work first."""

        def free_s(slot: SlotName) -> float:
            holder = self._holder(slot)
            return 0.0 if holder is None else self._expected.work_left(holder, now)

        first = sorted(filter(self._has_room_beside, self._slots), key=free_s)[:count]
        return tuple(slot for slot in self._slots if slot in first)

    def _drop(self, gang: Gang, slots: Slots, reason: str, now: float) -> Drop:
        keeps_others_out = gang.keeps_others_out
        gang.enter(Phase.DROPPING, now, slots)
        gang.keeps_others_out = keeps_others_out
        return Drop(gang.policy, slots, reason)

    def _abandon(self, gang: Gang, lost: SlotName, now: float) -> Iterable[Decision]:
        left = tuple(slot for slot in gang.slots if slot != lost)
        is_dropping, gang.computing = gang.phase is Phase.DROPPING, False
        if gang.ready and gang.waiting_since is None:
            gang.waiting_since = now
        if not left:
            gang.enter(Phase.OUT, now)
        elif is_dropping:
            gang.slots = left
        else:
            yield self._drop(gang, left, f"{lost} was lost", now)

    # ------------------------------------------------------------------ figures

    def _gang(self, policy: PolicyName) -> Gang:
        if policy not in self._gangs:
            raise ProtocolViolation(
                f"policy {policy} is unknown to the pool, which has {_listed(self._gangs)}"
            )
        return self._gangs[policy]

    def _pass_time(self, now: float) -> None:
        if self._now is not None:
            if now < self._now:
                raise ProtocolViolation(f"an event at {now} s was reported after one at {self._now} s")
            for gang in self._gangs.values():
                gang.pass_time(now - self._now)
        self._now = now

    def _holder(self, slot: SlotName) -> Gang | None:
        """The gang that keeps others from computing on ``slot``."""
        return next((g for g in self._gangs.values() if g.keeps_others_out and slot in g.slots), None)

    def _states_on(self, slot: SlotName) -> int:
        return sum(slot in gang.slots for gang in self._gangs.values())

    def _states_that_wait(self, slot: SlotName) -> int:
        return sum(slot in gang.slots for gang in self._gangs.values() if gang.waits)

    def _has_room_beside(self, slot: SlotName) -> bool:
        """A state may be prefetched on ``slot``, and the gang that is bound there next has room for its own."""
        room = self._config.states_per_slot
        return self._states_on(slot) < room and self._states_that_wait(slot) < room - 1


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
