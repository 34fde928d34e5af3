"""The sharing of slots by policies under arbitrary events, held against a model of all that the owner knows."""

from collections.abc import Iterable

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexmarl.actors.errors import ProtocolViolation
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

_PREFETCH = (Phase.PREFETCHING, Phase.PREFETCHED)
_HOLDING = (Phase.BINDING, Phase.BOUND)
_LEAVING = (Phase.SUSPENDING, Phase.DROPPING)
_MOVING = (Phase.PREFETCHING, Phase.BINDING, Phase.SUSPENDING, Phase.DROPPING)


class Events(RuleBasedStateMachine):
    """Computations become ready, the owner carries out decisions in any order, slots are lost and join."""

    @initialize(
        slots=strategies.integers(1, 5),
        ranks=strategies.lists(
            strategies.tuples(strategies.integers(1, 5), strategies.integers(0, 4)), min_size=1, max_size=6
        ),
        room=strategies.integers(1, 3),
        patience=strategies.integers(1, 3),
        hysteresis=strategies.sampled_from([0.0, 1.0]),
    )
    def begin(
        self, slots: int, ranks: list[tuple[int, int]], room: int, patience: int, hysteresis: float
    ) -> None:
        self.now = 0.0
        self.slots = [SlotName(f"slot-{n}") for n in range(slots)]
        self.made, self.ended = slots, 0
        self.ranks = {PolicyName(f"p{n}"): min(slots, count) for n, (count, _) in enumerate(ranks)}
        spare = {PolicyName(f"p{n}"): fewer for n, (_, fewer) in enumerate(ranks)}
        self.fewest = {policy: max(1, count - spare[policy]) for policy, count in self.ranks.items()}
        self.room = room
        config = AllocatorConfig(states_per_slot=room, patience=patience, hysteresis=hysteresis)
        self.allocator = Allocator(self.slots, self.ranks, config, self.fewest)
        self.ready = dict.fromkeys(self.ranks, 0)
        self.phase = dict.fromkeys(self.ranks, Phase.OUT)
        self.places: dict[PolicyName, tuple[SlotName, ...]] = dict.fromkeys(self.ranks, ())
        self.computing: set[PolicyName] = set()
        self.held_at_loss: set[PolicyName] = set()
        self.has_run: set[PolicyName] = set()  # since it was bound last
        self.most_slots = slots
        self.divided: set[PolicyName] = set()
        """Policies without work that have left their slots for their shares."""
        self.has_gradient: set[PolicyName] = set()

    # ------------------------------------------------------------------ the owner

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for one in decisions:
            assert one.reason
            policy, phase = one.policy, self.phase[one.policy]
            match one:
                case Bind(_, slots):
                    self._check_slots(policy, slots)
                    assert phase is Phase.OUT or (phase is Phase.PREFETCHED and slots == self.places[policy])
                    assert self.ready[policy] > 0 or policy in self.divided
                    assert not any(self._holders(slot) for slot in slots), "no slot twice"
                    self._move(policy, Phase.BINDING, slots)
                    self.has_run.discard(policy)
                    if not self.ready[policy]:
                        self.has_run.add(policy)  # it had nothing to run
                    self.divided.discard(policy)
                case Run():
                    assert phase is Phase.BOUND and policy not in self.computing and self.ready[policy] > 0
                    self.ready[policy] -= 1
                    self.has_run.add(policy)
                    self.computing.add(policy)
                case Suspend():
                    assert phase is Phase.BOUND and policy not in self.computing
                    assert policy in self.has_run, "every gang that was bound computes"
                    waiting = [other for other in self.ranks if other != policy and self._waits(other)]
                    free = sum(not self._holders(slot) for slot in self.slots)
                    if self._all_rest():
                        self.divided |= {one for one in self.ranks if self.phase[one] is Phase.OUT} | {policy}
                    elif not waiting:
                        self._check_growth(policy)
                    loading = [other for other in waiting if self.phase[other] is Phase.PREFETCHING]
                    wanted = sum(self.ranks[other] for other in waiting)
                    assert loading or wanted > free or not waiting, "if it needs that"
                    self._move(policy, Phase.SUSPENDING, self.places[policy])
                case Prefetch(_, slots):
                    assert phase is Phase.OUT and self.ready[policy] > 0
                    self._check_slots(policy, slots)
                    self._move(policy, Phase.PREFETCHING, slots)
                    for slot in slots:
                        waiting = [p for p in self._on(slot) if self.phase[p] in _PREFETCH]
                        assert len(waiting) < self.room, "there is room for the gang that is bound next"
                case Drop(_, slots):
                    assert set(slots) <= set(self.places[policy]) and phase is Phase.PREFETCHED
                    self._move(policy, Phase.DROPPING, slots)

    def _all_rest(self) -> bool:
        """No policy has work or a gradient, and none moves but for its share."""
        moving = (Phase.SUSPENDING, Phase.OUT)
        return not (self.computing or any(self.ready.values()) or self.has_gradient) and all(
            phase is Phase.BOUND or (phase in moving and (one in self.divided or phase is Phase.OUT))
            for one, phase in self.phase.items()
        )

    def _check_growth(self, policy: PolicyName) -> None:
        """A policy leaves its slots for another one, or for more."""
        places = self.places[policy]
        assert len(places) < self.ranks[policy]
        others = [slot for slot in self.slots if slot not in places]
        assert any(
            all(self.phase[one] is Phase.BOUND and one not in self.computing for one in self._holders(slot))
            for slot in others
        ), "there are slots without work"

    def _check_slots(self, policy: PolicyName, slots: tuple[SlotName, ...]) -> None:
        assert self.fewest[policy] <= len(set(slots)) == len(slots) <= self.ranks[policy], "all or none"
        assert set(slots) <= set(self.slots)

    def _move(self, policy: PolicyName, phase: Phase, slots: tuple[SlotName, ...]) -> None:
        self.phase[policy], self.places[policy] = phase, slots
        assert all(len(self._on(slot)) <= self.room for slot in slots), (
            "no more states than there is room for"
        )

    def _on(self, slot: SlotName) -> list[PolicyName]:
        return [policy for policy, slots in self.places.items() if slot in slots]

    def _holders(self, slot: SlotName) -> list[PolicyName]:
        return [p for p in self._on(slot) if self.phase[p] in _HOLDING or p in self.held_at_loss]

    def _waits(self, policy: PolicyName) -> bool:
        return self.ready[policy] > 0 and self.phase[policy] in (Phase.OUT, *_PREFETCH)

    # ------------------------------------------------------------------ events

    @rule(data=strategies.data(), count=strategies.integers(1, 4))
    def becomes_ready(self, data: strategies.DataObject, count: int) -> None:
        policy = data.draw(strategies.sampled_from(sorted(self.ranks)))
        for _ in range(count):
            self.ready[policy] += 1
            self._carry_out(self.allocator.ready(policy, self.now))

    def _under_way(self) -> list[PolicyName]:
        return [p for p in self.ranks if p in self.computing or self.phase[p] in _MOVING]

    @precondition(lambda self: self._under_way())
    @rule(data=strategies.data(), seconds=strategies.floats(0.0, 10.0))
    def something_ends(self, data: strategies.DataObject, seconds: float) -> None:
        self.now += seconds
        self._end(data.draw(strategies.sampled_from(self._under_way())))

    def _end(self, policy: PolicyName) -> None:
        if policy in self.computing:
            self.computing.remove(policy)
            # Every third is an optimizer step.
            self.ended += 1
            is_typical = self.ended % 3 > 0
            (self.has_gradient.add if is_typical else self.has_gradient.discard)(policy)
            self._carry_out(self.allocator.ended(policy, self.now, is_typical=is_typical))
            return
        phase = self.phase[policy]
        if phase is Phase.BINDING:
            self.phase[policy] = Phase.BOUND
            self._carry_out(self.allocator.bound(policy, self.now))
        elif phase is Phase.PREFETCHING:
            self.phase[policy] = Phase.PREFETCHED
            self._carry_out(self.allocator.prefetched(policy, self.now))
        else:
            self.held_at_loss.discard(policy)
            self._move(policy, Phase.OUT, ())
            ended = self.allocator.suspended if phase is Phase.SUSPENDING else self.allocator.dropped
            self._carry_out(ended(policy, self.now))

    @precondition(lambda self: self.slots)
    @rule(data=strategies.data())
    def slot_is_lost(self, data: strategies.DataObject) -> None:
        slot = data.draw(strategies.sampled_from(self.slots))
        self.slots.remove(slot)
        hit = self._on(slot)
        again = []
        for policy in hit:
            if self.phase[policy] in _HOLDING:
                self.held_at_loss.add(policy)
            left = tuple(one for one in self.places[policy] if one != slot)
            if policy in self.computing:
                self.computing.remove(policy)
                again.append(policy)
            self.places[policy] = left
            self.phase[policy] = Phase.DROPPING if left else Phase.OUT
            if not left:
                self.held_at_loss.discard(policy)
        decisions = self.allocator.slot_lost(slot, self.now)
        drops = [one for one in decisions if isinstance(one, Drop) and one.policy in hit]
        for drop in drops:
            assert drop.slots == self.places[drop.policy] and drop.reason
        self._carry_out(one for one in decisions if one not in drops)
        for policy in again:
            self.ready[policy] += 1
            self._carry_out(self.allocator.ready(policy, self.now))

    @precondition(lambda self: len(self.slots) < self.most_slots)
    @rule()
    def slot_joins(self) -> None:
        self.made += 1
        slot = SlotName(f"slot-{self.made}")
        self.slots.append(slot)
        self._carry_out(self.allocator.slot_joined(slot, self.now))

    @rule(data=strategies.data())
    def an_event_that_cannot_happen_is_refused(self, data: strategies.DataObject) -> None:
        policy = data.draw(strategies.sampled_from(sorted(self.ranks)))
        expected = {
            "prefetched": Phase.PREFETCHING,
            "bound": Phase.BINDING,
            "ended": None,
            "suspended": Phase.SUSPENDING,
            "dropped": Phase.DROPPING,
        }
        event = data.draw(strategies.sampled_from(sorted(expected)))
        is_possible = policy in self.computing if event == "ended" else self.phase[policy] is expected[event]
        if not is_possible:
            with pytest.raises(ProtocolViolation, match=f"{policy} was reported {event}"):
                getattr(self.allocator, event)(policy, self.now)

    # ------------------------------------------------------------------ always

    @invariant()
    def phases_agree(self) -> None:
        assert {policy: self.allocator.phase(policy) for policy in self.ranks} == self.phase

    @invariant()
    def a_bound_gang_with_work_computes(self) -> None:
        for policy, phase in self.phase.items():
            if phase is Phase.BOUND and self.ready[policy]:
                assert policy in self.computing

    @invariant()
    def no_slot_idles_while_a_gang_that_fits_waits(self) -> None:
        """Unless a larger gang that waits too collects slots, or one waits for states that are about to leave."""
        moving = {slot for p, slots in self.places.items() if p in self._under_way() for slot in slots}
        usable = [slot for slot in self.slots if slot not in moving]  # nothing computes or is copied there
        waiting = [p for p in self.ranks if self._waits(p) and self.phase[p] is not Phase.PREFETCHING]
        leaving = {s for p, slots in self.places.items() if self.phase[p] in _LEAVING for s in slots}
        soon_free = [slot for slot in self.slots if slot in leaving or not self._holders(slot)]
        for policy in waiting:
            fewest, most = self.fewest[policy], min(self.ranks[policy], len(self.slots))
            if len(usable) < fewest <= most or (leaving and (len(usable) < most or fewest <= len(soon_free))):
                return
        assert not [policy for policy in waiting if self.fewest[policy] <= len(usable)]

    def teardown(self) -> None:
        """All that is ready runs, after a bounded number of events."""
        if not hasattr(self, "allocator"):
            return
        while len(self.slots) < self.most_slots:
            self.slot_joins()
        work = sum(self.ready.values()) + len(self.computing)
        bound = 8 * (work + len(self.ranks) + 1) * (len(self.ranks) + 1)
        for _ in range(bound):
            if not (under_way := self._under_way()):
                break
            self.now += 1.0
            self._end(under_way[-1])
        assert not self._under_way() and not any(self.ready.values())


Events.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
TestEvents = Events.TestCase
