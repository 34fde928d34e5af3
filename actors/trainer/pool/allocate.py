"""The decisions of the training pool: which policies hold which slots. Pure: events with their times in, decisions out.

There are fewer slots than the policies need all at once. A policy's gang, all its ranks, is bound when a computation is
ready, kept while it has work, and suspended for another policy that waits. Three rules, the strongest first:

1. **Due.** A gang that has waited while ``patience`` computations per slot began is due. The one that has waited
   longest takes the next slots at which a computation ends, so that small gangs don't overtake a large one for ever.
   A gang that was bound runs at least one computation, and a claim to slots waits for nothing but computations and
   copies under way: there is no deadlock, and each ready computation runs after a bounded number of others.
2. **Critical.** Work that is ready can't end before ``max(all work / slots, the longest policy's work)``. A waiting
   policy whose own work fills that time, up to ``margin``, takes the slots of policies with less work, between two
   of their computations (zero laxity first, for a common deadline: McNaughton 1959, Lee 1994). It does so only if the
   policy that leaves has computed for ``hysteresis`` times the cost of the swap, and has more work left than that.
3. **Longest.** The others are bound to free slots and to those of policies without work, the most ready work first.

A policy that may have fewer ranks is bound to its **share** of the slots, in proportion to the work that it has had of
late (``slot_shares.py``), or to those without work if they are fewer. So all policies compute at the same time, if the
slots are enough for that. A gang with more than its share makes room for one that waits, as one with less work does for
a critical one. Between two steps, while no policy has work or a gradient, the slots are **divided** again: if one gang
has clearly less than its share, all leave whose slots are not their shares, and are bound to these before work comes.
So the move is made beside the rollouts, which must have lasted longer than it. Within a step a gang on less than its
share **grows** when no policy waits and other slots are without work: it is suspended between two computations, and
bound again to more. It does so once the time that it has lost on fewer slots is ``hysteresis`` times the cost of the
swap: so it never loses much more than the best schedule in hindsight would have (ski rental; Karlin et al. 1988). Not
if it has just waited for its samples: those of other policies come from the same queries at the same moment. Beyond
its share it grows in the same way, to slots of policies that have been without work for twice as long as they, or
itself, ever before.

A policy that waits is prefetched to the slots that are expected to be free first, if they have room for its state
beside the one that computes. Of slots that are as good, those of the hosts that its state lies on come first. Work is
the number of ready computations times the mean time of the policy's last ones.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ...errors import GangTooLarge, ProtocolViolation
from ...names import PolicyName, SlotName
from ...rolling_mean import rolling_mean
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
)
from .slot_choice import AllocatorConfig, Occupancy, SlotChoice, join_names

_KEPT_LOAD: Final = 0.99
"""The part of a policy's load that is left after one more computation of any: the last hundred decide."""


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
        fewest: Mapping[PolicyName, int] | None = None,
        replica_sizes: Mapping[PolicyName, int] | None = None,
        hosts: Mapping[SlotName, str] | None = None,
    ) -> None:
        """``slots``: those of a host are neighbours. ``fewest``: ranks of a policy that may have less than ``ranks``.
        ``replica_sizes``: ranks of each replica of a policy that has several. ``hosts``: of the slots; None: all are on
        one. Raises GangTooLarge."""
        for policy, count in ranks.items():
            if count > len(slots):
                raise GangTooLarge(policy, count, len(slots))
        self._config = config or AllocatorConfig()
        self._slots = list(slots)
        self._gangs = {
            policy: Gang(
                policy, count, (fewest or {}).get(policy, count), (replica_sizes or {}).get(policy, 1)
            )
            for policy, count in ranks.items()
        }
        self._expected = ExpectedSeconds(self._gangs.values())
        self._now: float | None = None
        self._hosts = dict(hosts or {})
        self._occupancy = Occupancy(self._slots, self._gangs, self._config.state_count, self._hosts)

    # ------------------------------------------------------------------ events

    def ready(self, policy: PolicyName, now: float) -> list[Decision]:
        """One more computation of ``policy`` may run."""
        gang = self._gang(policy)
        self._pass_time(now)
        gang.note_ready(now)
        # One that leaves its slots waits too: it needs others.
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
        if not gang.was_prefetched:  # else its ranks were only connected
            gang.load_s = rolling_mean(gang.load_s, now - gang.began)
        gang.enter(Phase.BOUND, now, gang.slots)
        return self._decide(now)

    def ended(
        self, policy: PolicyName, now: float, *, is_typical: bool = True, even_ranks: float = math.inf
    ) -> list[Decision]:
        """The running computation ended. ``is_typical``: its time says something about the next ones. ``even_ranks``:
        those that it has kept busy all the time."""
        gang = self._gang(policy)
        gang.require("ended", Phase.BOUND, computing=True)
        self._pass_time(now)
        if is_typical:
            for other in self._gangs.values():
                other.load *= _KEPT_LOAD
            gang.measure(now - gang.began, even_ranks)
        gang.computed_s += now - gang.began
        gang.computing, gang.idle_since, gang.has_stepped = False, now, not is_typical
        return self._decide(now)

    def suspended(self, policy: PolicyName, now: float, homes: Iterable[str] = ()) -> list[Decision]:
        """A Suspend was carried out: the state is out, on the hosts ``homes``; its memory on the slots is free."""
        gang = self._gang(policy)
        gang.require("suspended", Phase.SUSPENDING)
        self._pass_time(now)
        gang.save_s = rolling_mean(gang.save_s, now - gang.began)
        gang.homes = frozenset(homes)
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
            raise ProtocolViolation(
                f"slot {slot} was reported lost, but the pool has {join_names(self._slots)}"
            )
        self._pass_time(now)
        self._slots.remove(slot)
        decisions: list[Decision] = []
        for gang in self._gangs.values():
            if slot in gang.slots:
                decisions += self._abandon(gang, slot, now)
        return decisions + self._decide(now)

    def slot_joined(self, slot: SlotName, now: float, host: str = "") -> list[Decision]:
        """An empty slot is there, on ``host``, a new one or one that was lost."""
        if slot in self._slots:
            raise ProtocolViolation(f"slot {slot} was reported joined, but it is in the pool")
        self._pass_time(now)
        self._slots.append(slot)
        self._hosts[slot] = host
        self._occupancy.sort(self._slots)
        return self._decide(now)

    # ------------------------------------------------------------------ readers

    def phase(self, policy: PolicyName) -> Phase:
        """The present one. Raises ProtocolViolation for an unknown policy."""
        return self._gang(policy).phase

    def seconds(self, policy: PolicyName) -> GangSeconds:
        """Seconds until the last event, by what the policy did."""
        return self._gang(policy).seconds

    # ------------------------------------------------------------------ decisions and their bookkeeping

    def _decide(self, now: float) -> list[Decision]:
        """All decisions that follow from the present state."""
        chosen = SlotChoice(self._config, self._slots, self._gangs, self._occupancy, self._expected, now)
        # Suspend first: if a slot has room for several states, the next one is bound in the same answer.
        decisions = [*self._suspend(chosen, now), *self._bind(chosen, now)]
        return decisions + self._run(now) + self._prefetch(chosen, now)

    def _suspend(self, chosen: SlotChoice, now: float) -> Iterable[Decision]:
        for policy, (successor, reason) in chosen.leaving.items():
            gang = self._gangs[policy]
            # One with work computes on while its successor is loaded beside it: the slot would stand still otherwise.
            if gang.is_at_boundary and (gang.starves or not self._will_be_loaded(successor, chosen)):
                yield self._leave(gang, reason, now)
        for gang, goal, reason in chosen.divided:
            gang.goal = goal
            if gang.phase is Phase.BOUND:
                yield self._leave(gang, reason, now)

    def _leave(self, gang: Gang, reason: str, now: float) -> Suspend:
        gang.enter(Phase.SUSPENDING, now, gang.slots)
        gang.waiting_since = now if gang.ready else None
        return Suspend(gang.policy, reason)

    def _will_be_loaded(self, gang: Gang, chosen: SlotChoice) -> bool:
        """The state of a waiting ``gang`` comes to its target in a while, beside those that compute there."""
        if gang.policy not in chosen.targets:
            return True  # it is due, and not all slots of its target are known yet
        target, _ = chosen.targets[gang.policy]
        if gang.phase is not Phase.OUT:
            return gang.phase is Phase.PREFETCHING or set(gang.slots) != set(target)
        return all(map(self._occupancy.will_have_room_beside, target))

    def _bind(self, chosen: SlotChoice, now: float) -> Iterable[Decision]:
        for gang in (*chosen.waiting, *chosen.ahead):
            if gang.policy not in chosen.targets:
                continue
            slots, reason = chosen.targets[gang.policy]
            if gang.phase is Phase.PREFETCHED and set(gang.slots) != set(slots):
                yield self._drop(gang, gang.slots, f"other slots are free earlier: {join_names(slots)}", now)
                continue
            is_loaded = gang.phase is Phase.PREFETCHED
            if (
                any(self._occupancy.holder(slot) is not None for slot in slots)
                or gang.phase is Phase.PREFETCHING
            ):
                continue
            if is_loaded or all(map(self._occupancy.has_room, slots)):
                gang.was_prefetched = is_loaded
                gang.enter(Phase.BINDING, now, gang.slots if is_loaded else slots)
                gang.waiting_since, gang.passed, gang.runs, gang.computed_s, gang.goal = None, 0, 0, 0.0, 0
                gang.expect_slots(len(gang.slots))
                yield Bind(gang.policy, gang.slots, reason)

    def _run(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for gang in self._gangs.values():
            if gang.is_at_boundary and gang.ready:
                decisions.append(Run(gang.policy, f"{gang.ready} ready"))
                gang.ready -= 1
                gang.runs += 1
                gang.computing, gang.began = True, now
                # Counted in computations, not seconds: policies of any size wait for equally many turns.
                for other in self._gangs.values():
                    other.passed += other.waiting_since is not None
        return decisions

    def _prefetch(self, chosen: SlotChoice, now: float) -> list[Decision]:
        """Begins to load waiting gangs beside those that compute."""
        decisions: list[Decision] = []
        for gang in chosen.waiting:
            if gang.phase is not Phase.OUT or gang.fewest > len(self._slots):
                continue
            if gang.policy in chosen.targets:
                slots, reason = chosen.targets[gang.policy]
            elif gang.fewest < gang.ranks:
                continue  # its number of ranks is not known yet
            else:
                slots = self._occupancy.earliest_free(gang, self._expected, now)
                reason = f"{chosen.claim(gang)}; these slots are expected to be free first"
            if gang.fewest <= len(slots) and all(map(self._occupancy.has_room_beside, slots)):
                gang.enter(Phase.PREFETCHING, now, slots)
                decisions.append(Prefetch(gang.policy, slots, reason))
        return decisions

    def _drop(self, gang: Gang, slots: Slots, reason: str, now: float) -> Drop:
        # A gang that was bound may still compute there, or wait for the rank that was lost; a prefetched one does not.
        keeps_others_out = gang.keeps_others_out
        gang.enter(Phase.DROPPING, now, slots)
        gang.keeps_others_out = keeps_others_out
        return Drop(gang.policy, slots, reason)

    def _abandon(self, gang: Gang, lost: SlotName, now: float) -> Iterable[Decision]:
        remaining = tuple(slot for slot in gang.slots if slot != lost)
        # All ranks or none: with one rank's part of the weights gone, the other parts are of no use.
        is_dropping, gang.computing = gang.phase is Phase.DROPPING, False
        if gang.ready and gang.waiting_since is None:
            gang.waiting_since = now
        if not remaining:
            gang.enter(Phase.OUT, now)
        elif is_dropping:
            gang.slots = remaining
        else:
            yield self._drop(gang, remaining, f"{lost} was lost", now)

    # ------------------------------------------------------------------ figures

    def _gang(self, policy: PolicyName) -> Gang:
        if policy not in self._gangs:
            raise ProtocolViolation(
                f"policy {policy} is unknown to the pool, which has {join_names(self._gangs)}"
            )
        return self._gangs[policy]

    def _pass_time(self, now: float) -> None:
        if self._now is not None:
            if now < self._now:
                raise ProtocolViolation(f"an event at {now} s was reported after one at {self._now} s")
            for gang in self._gangs.values():
                gang.pass_time(now - self._now)
        self._now = now
