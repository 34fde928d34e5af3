"""The sharing of slots by policies: its rules, by hand."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings, strategies

from flexmarl.actors.errors import GangTooLarge, ProtocolViolation
from flexmarl.actors.names import PolicyName, SlotName
from flexmarl.actors.trainer.pool.allocate import Allocator
from flexmarl.actors.trainer.pool.gangs import Bind, Drop, Phase, Prefetch, Run, Suspend
from flexmarl.actors.trainer.pool.slot_choice import AllocatorConfig

from ..pool_owner import Owner, kinds

A, B, C, D, E = (PolicyName(name) for name in "abcde")
S0, S1, S2, S3 = (SlotName(f"slot-{n}") for n in range(4))


class TestBinding:
    def test_a_gang_is_bound_with_all_its_ranks_or_not_at_all(self) -> None:
        allocator = Allocator([S0, S1, S2], {A: 2, B: 2, C: 1})
        bind, *rest = allocator.ready(A, 0.0)
        assert isinstance(bind, Bind) and bind.slots == (S0, S1) and not rest
        assert kinds(allocator.bound(A, 1.0)) == [("Run", A)]
        assert kinds(allocator.ready(B, 2.0)) == [("Prefetch", B)], "one slot is free, it needs two"
        bind, *rest = allocator.ready(C, 3.0)
        assert isinstance(bind, Bind) and bind.slots == (S2,) and not rest, "C needs that one only"

    def test_a_gang_larger_than_the_pool_is_refused_with_the_numbers(self) -> None:
        with pytest.raises(GangTooLarge, match="policy b has 3 ranks, but the training pool has 2 slots"):
            Allocator([S0, S1], {A: 1, B: 3})

    def test_a_policy_runs_one_computation_at_a_time(self) -> None:
        owner = Owner(2, {A: 1})
        owner.ready(A, 3)
        assert owner.finish() == 3.0 and owner.count(Run) == 3 and owner.count(Bind) == 1


class TestSuspending:
    def test_a_gang_without_work_stays_as_long_as_no_other_waits(self) -> None:
        owner = Owner(1, {A: 1, B: 1})
        owner.ready(A)
        owner.finish()
        assert owner.allocator.phase(A) is Phase.BOUND and owner.count(Suspend) == 0
        owner.ready(A)
        owner.finish()
        assert owner.count(Bind) == 1
        owner.ready(B)
        assert owner.count(Suspend, A) == 1
        suspend = next(one for one in owner.decisions if isinstance(one, Suspend))
        assert "no computation is ready" in suspend.reason and "b has waited" in suspend.reason

    def test_a_gang_is_kept_while_it_has_work(self) -> None:
        owner = Owner(1, {A: 1, B: 1})
        owner.ready(A, 5)
        owner.ready(B, 5)
        assert owner.finish() == 10.0
        assert [one.policy for one in owner.decisions if isinstance(one, Run)] == [A] * 5 + [B] * 5

    def test_no_gang_leaves_while_enough_slots_are_free(self) -> None:
        owner = Owner(3, {A: 1, B: 2})
        for policy in (A, B):
            owner.ready(policy)
            owner.finish()
        assert owner.count(Suspend) == 0 and owner.allocator.phase(A) is Phase.BOUND

    def test_the_fewest_gangs_leave(self) -> None:
        owner = Owner(4, {A: 1, B: 1, C: 2, D: 2})
        for policy in (A, B, C):
            owner.ready(policy)
            owner.finish()
        owner.ready(D)
        assert owner.count(Suspend, C) == 1 and owner.count(Suspend) == 1

    def test_no_gang_leaves_if_those_that_leave_with_it_suffice(self) -> None:
        owner = Owner(4, {A: 1, B: 3, C: 2})
        for policy in (A, B):
            owner.ready(policy)
            owner.finish()
        owner.ready(C)
        assert owner.count(Suspend, B) == 1 and owner.count(Suspend) == 1

    def test_an_empty_slot_is_preferred_to_one_that_a_state_must_leave(self) -> None:
        allocator = Allocator([S0, S1], {A: 1, B: 1, C: 2}, AllocatorConfig(states_per_slot=1))
        allocator.ready(A, 0.0)
        allocator.bound(A, 0.0)
        allocator.ended(A, 1.0)
        assert kinds(allocator.ready(C, 2.0)) == [("Suspend", A)]
        assert allocator.ready(B, 3.0) == []
        (bind,) = allocator.ready(B, 3.0)  # now it has more work than C
        assert isinstance(bind, Bind) and bind.slots == (S1,)


class TestOrder:
    def test_times_that_say_nothing_about_the_next_computations_are_not_expected_of_them(self) -> None:
        """A binding at the start computes nothing: else all policies would seem to have little work."""
        allocator = Allocator([S0], {A: 1, B: 1})
        for seconds, is_typical in ((0.0, False), (4.0, True), (0.5, False)):
            now = 10.0 * (1 + allocator.seconds(A).computing)
            allocator.ready(A, now)
            if allocator.phase(A) is not Phase.BOUND:
                allocator.bound(A, now)
            allocator.ended(A, now + seconds, is_typical=is_typical)
        assert allocator._gangs[A].compute_s == 4.0

    def test_slots_that_wait_for_the_longest_sample_are_not_counted_as_load(self) -> None:
        """Else a small batch on many slots would seem to be much work, and get more of them."""
        allocator = Allocator([S0, S1], {A: 2, B: 1})
        allocator.ready(A, 0.0)
        allocator.bound(A, 0.0)
        allocator.ended(A, 4.0, even_ranks=1.25)
        assert allocator._gangs[A].load == 5.0
        allocator.ready(A, 4.0)
        allocator.ended(A, 8.0, even_ranks=6.0)
        assert allocator._gangs[A].load == pytest.approx(5.0 * 0.99 + 8.0), "it has two slots"

    def test_the_policy_with_most_work_is_bound_first(self) -> None:
        owner = Owner(1, {A: 1, B: 1, C: 1})
        owner.ready(A, 9)
        owner.ready(B, 2)
        owner.ready(C, 4)
        owner.finish()
        assert [one.policy for one in owner.decisions if isinstance(one, Bind)] == [A, C, B]

    def test_a_policy_whose_work_determines_the_end_takes_a_slot_between_two_computations(self) -> None:
        """Five policies with 10 s each on two slots: 25 s if some are divided, 30 s if each is run to its end."""
        policies = (A, B, C, D, E)
        owner = Owner(2, dict.fromkeys(policies, 1))
        for policy in policies:
            owner.ready(policy, 10)
        assert owner.finish() == 25.0
        assert owner.count(Suspend) <= 6, "and few swaps"
        assert any("determines the end" in one.reason for one in owner.decisions if isinstance(one, Suspend))

    def test_not_if_the_swap_costs_more_than_the_work_that_is_left(self) -> None:
        policies = (A, B, C, D, E)
        owner = Owner(2, dict.fromkeys(policies, 1), AllocatorConfig(patience=100), copy_s=6.0)
        for policy in policies:
            owner.ready(policy, 10)
        owner.finish()
        suspended = [one for one in owner.decisions if isinstance(one, Suspend)]
        assert len(suspended) == 3 and all("no computation is ready" in one.reason for one in suspended)

    @pytest.mark.parametrize("hysteresis", [3.0, 6.0])
    def test_nor_before_the_policy_that_leaves_has_computed_for_some_swaps(self, hysteresis: float) -> None:
        owner = self._two_bound_and_one_with_more_work(0.5, hysteresis, work=20)
        while not (left := [one for one in owner.decisions if "less work" in one.reason]):
            owner.advance()
        last_bind = max(
            n for n, one in enumerate(owner.decisions) if kinds([one]) == [("Bind", left[0].policy)]
        )
        runs = sum(kinds([one]) == [("Run", left[0].policy)] for one in owner.decisions[last_bind:])
        assert hysteresis <= runs <= hysteresis + 2

    def test_nor_if_the_policy_that_leaves_has_little_left(self) -> None:
        owner = self._two_bound_and_one_with_more_work(2.0, 0.0, work=4)
        owner.finish()
        assert not [one for one in owner.decisions if "less work" in one.reason]

    def _two_bound_and_one_with_more_work(self, copy_s: float, hysteresis: float, work: int) -> Owner:
        """After one computation of each, so that the costs of a swap are known."""
        config = AllocatorConfig(hysteresis=hysteresis, patience=1000)
        owner = Owner(2, {A: 1, B: 1, C: 1}, config, copy_s=copy_s)
        for policy in (A, B, C):
            owner.ready(policy)
        owner.finish()
        is_bound = {policy: owner.allocator.phase(policy) is Phase.BOUND for policy in (A, B, C)}
        for policy in sorted(is_bound, key=lambda policy: not is_bound[policy]):
            owner.ready(policy, work if is_bound[policy] else 60)
        return owner

    def test_it_computes_until_the_state_of_the_other_is_loaded(self) -> None:
        allocator = Allocator([S0], {A: 1, B: 1}, AllocatorConfig(patience=1))
        for _ in range(9):
            allocator.ready(A, 0.0)
        allocator.bound(A, 0.0)
        assert kinds(allocator.ready(B, 0.0)) == [("Prefetch", B)]
        for second in (1.0, 2.0):
            assert kinds(allocator.ended(A, second)) == [("Run", A)]
        assert allocator.prefetched(B, 2.5) == []
        assert kinds(allocator.ended(A, 3.0)) == [("Suspend", A), ("Bind", B)]


class TestPrefetching:
    def test_the_next_state_is_loaded_while_another_computes_and_takes_over_at_once(self) -> None:
        allocator = Allocator([S0], {A: 1, B: 1})
        allocator.ready(A, 0.0)
        allocator.bound(A, 0.0)
        prefetch, *rest = allocator.ready(B, 1.0)
        assert isinstance(prefetch, Prefetch) and prefetch.slots == (S0,) and not rest
        assert allocator.prefetched(B, 2.0) == []
        assert kinds(allocator.ended(A, 10.0)) == [("Suspend", A), ("Bind", B)]
        assert kinds(allocator.bound(B, 10.0)) == [("Run", B)]
        assert allocator.suspended(A, 11.0) == []

    def test_a_slot_with_room_for_one_state_is_emptied_first(self) -> None:
        allocator = Allocator([S0], {A: 1, B: 1}, AllocatorConfig(states_per_slot=1))
        allocator.ready(A, 0.0)
        allocator.bound(A, 0.0)
        assert allocator.ready(B, 1.0) == []
        assert kinds(allocator.ended(A, 10.0)) == [("Suspend", A)]
        assert kinds(allocator.suspended(A, 11.0)) == [("Bind", B)]

    def test_a_prefetched_state_is_dropped_if_another_slot_is_free_earlier(self) -> None:
        allocator = Allocator([S0, S1], {A: 1, B: 1, C: 1})
        for policy in (A, B):
            allocator.ready(policy, 0.0)
            allocator.bound(policy, 0.0)
        (prefetch,) = allocator.ready(C, 0.0)
        assert isinstance(prefetch, Prefetch)
        allocator.prefetched(C, 1.0)
        other = B if prefetch.slots == (S0,) else A
        decisions = allocator.ended(other, 2.0)
        assert kinds(decisions) == [("Suspend", other), ("Drop", C)] and "free earlier" in decisions[1].reason
        allocator.suspended(other, 3.0)
        (bind,) = allocator.dropped(C, 4.0)
        assert isinstance(bind, Bind) and bind.slots != prefetch.slots

    def test_a_state_that_is_being_loaded_keeps_no_other_slot_from_others(self) -> None:
        allocator = Allocator([S0, S1], {A: 1, B: 1, C: 1, D: 1})
        for policy in (A, B):
            allocator.ready(policy, 0.0)
            allocator.bound(policy, 0.0)
        (prefetch,) = allocator.ready(C, 0.0)
        assert isinstance(prefetch, Prefetch)
        allocator.ready(C, 0.0)  # more work than D
        other = B if prefetch.slots == (S0,) else A
        assert kinds(allocator.ready(D, 1.0)) == [("Prefetch", D)]
        allocator.prefetched(D, 1.5)
        assert kinds(allocator.ended(other, 2.0)) == [("Suspend", other), ("Bind", D)]

    def test_swaps_that_prefetching_hides_take_no_time(self) -> None:
        def end(states: int) -> float:
            owner = Owner(1, {A: 1, B: 1, C: 1}, AllocatorConfig(states_per_slot=states), copy_s=0.1)
            left = Counter({A: 20, B: 20, C: 20})
            for policy in left:
                owner.ready(policy)
            while owner.queue:
                for policy in owner.advance():
                    left[policy] -= 1
                    if left[policy]:
                        owner.ready(policy)
            return owner.now

        assert end(2) == pytest.approx(60.1, abs=1.0)
        assert end(1) <= 60.1 + 60 * 0.2


class TestFairness:
    def test_a_large_gang_is_not_overtaken_for_ever_by_small_ones(self) -> None:
        config = AllocatorConfig(patience=4)
        owner = Owner(4, {A: 1, B: 1, C: 1, D: 1, E: 4}, config)
        for policy in (A, B, C, D):
            owner.ready(policy, 1000)
        owner.ready(E)
        passed = 0
        while not (begun := owner.advance())[E]:
            passed += begun.total()
        assert passed <= 4 * 4 + 4
        suspend = next(one for one in owner.decisions if isinstance(one, Suspend))
        assert "it has had its turn" in suspend.reason and "computations of others began" in suspend.reason

    def test_it_keeps_free_slots_while_others_are_not_free_yet(self) -> None:
        allocator = Allocator([S0, S1], {A: 1, B: 2, C: 1}, AllocatorConfig(patience=1, states_per_slot=1))
        allocator.ready(B, 0.0)
        allocator.bound(B, 0.0)
        allocator.slot_lost(S1, 1.0)
        allocator.dropped(B, 1.0)
        for _ in range(9):
            allocator.ready(A, 1.0)
        allocator.bound(A, 1.0)
        allocator.ready(B, 1.0)
        for second in (2.0, 3.0):
            allocator.ended(A, second)
        allocator.slot_lost(S0, 3.0)
        assert kinds(allocator.slot_joined(S0, 3.0)) == [("Bind", A)]
        assert allocator.slot_joined(S1, 3.0) == []
        assert allocator.ready(C, 3.0) == [], "B is due"
        assert kinds(allocator.bound(A, 4.0)) == [("Run", A)]
        assert kinds(allocator.ended(A, 5.0)) == [("Suspend", A)]
        assert kinds(allocator.suspended(A, 5.0)) == [("Bind", B)]

    def test_of_those_that_are_due_the_one_that_has_waited_longest_is_bound_first(self) -> None:
        allocator = Allocator([S0], {A: 1, B: 1, C: 1}, AllocatorConfig(patience=1, states_per_slot=1))
        for _ in range(9):
            allocator.ready(A, 0.0)
        allocator.ready(B, 0.1)
        for _ in range(20):
            allocator.ready(C, 0.2)
        allocator.bound(A, 1.0)
        assert kinds(allocator.ended(A, 2.0)) == [("Suspend", A)]
        assert kinds(allocator.suspended(A, 3.0)) == [("Bind", B)]

    @given(
        slots=strategies.integers(1, 5),
        ranks=strategies.lists(strategies.integers(1, 5), min_size=2, max_size=6),
        room=strategies.integers(1, 3),
        patience=strategies.integers(1, 4),
        copy_s=strategies.sampled_from([0.0, 0.3, 2.0]),
        seed=strategies.integers(0, 1000),
    )
    @settings(max_examples=50)
    def test_a_policy_with_one_computation_runs_although_all_others_always_have_work(
        self, slots: int, ranks: list[int], room: int, patience: int, copy_s: float, seed: int
    ) -> None:
        random = Random(seed)
        gangs = {PolicyName(f"p{n}"): min(slots, size) for n, size in enumerate(ranks)}
        config = AllocatorConfig(states_per_slot=room, patience=patience)
        owner = Owner(slots, gangs, config, compute_s=lambda _: random.uniform(0.5, 1.5), copy_s=copy_s)
        last, *others = gangs
        for policy in others:
            owner.ready(policy, random.randint(1, 5))
        owner.ready(last)
        passed = owner.count(Run) - owner.count(Run, last)
        while not owner.count(Run, last):
            begun = owner.advance()
            passed += begun.total() - begun[last]
            for policy in begun:
                if policy != last:
                    owner.ready(policy, begun[policy])
            assert passed <= (patience + 4 * len(gangs)) * slots
            assert len(owner.decisions) <= 20 * (passed + 10) * len(gangs), "no copying back and forth"


class TestSlots:
    def test_a_lost_slot_ends_its_gang_and_the_other_slots_are_dropped_first(self) -> None:
        allocator = Allocator([S0, S1, S2], {A: 2, B: 1})
        allocator.ready(A, 0.0)
        allocator.bound(A, 0.0)
        (drop,) = allocator.slot_lost(S0, 1.0)
        assert drop == Drop(A, (S1,), "slot-0 was lost")
        assert kinds(allocator.ready(A, 2.0)) == [], "what it computed is to be computed again"
        with pytest.raises(ProtocolViolation, match="policy a was reported ended, but it is dropping"):
            allocator.ended(A, 2.0)
        (bind,) = allocator.dropped(A, 3.0)
        assert isinstance(bind, Bind) and bind.slots == (S1, S2)

    def test_nothing_computes_on_a_slot_until_what_a_lost_gang_left_there_is_dropped(self) -> None:
        allocator = Allocator([S0, S1], {A: 2, B: 1})
        allocator.ready(A, 0.0)
        allocator.bound(A, 0.0)
        allocator.slot_lost(S0, 1.0)
        assert "Bind" not in dict(kinds(allocator.ready(B, 2.0)))
        decisions = allocator.dropped(A, 3.0)
        assert ("Bind", B) in kinds(decisions) or not decisions

    def test_a_gang_waits_until_as_many_slots_are_there_as_it_has_ranks(self) -> None:
        allocator = Allocator([S0, S1], {A: 2, B: 1}, AllocatorConfig(patience=1))
        allocator.slot_lost(S1, 0.0)
        assert allocator.ready(A, 0.0) == []
        assert kinds(allocator.ready(B, 0.0)) == [("Bind", B)], (
            "it holds no slot for a gang that can't be bound"
        )
        assert kinds(allocator.bound(B, 0.0)) == [("Run", B)]
        allocator.ended(B, 1.0)
        decisions = allocator.slot_joined(S2, 2.0)
        assert kinds(decisions)[0] == ("Suspend", B) and ("Bind", A) in kinds(decisions)

    def test_the_only_slot_of_a_gang_is_lost(self) -> None:
        allocator = Allocator([S0], {A: 1})
        allocator.ready(A, 0.0)
        assert allocator.slot_lost(S0, 1.0) == [] and allocator.phase(A) is Phase.OUT
        assert kinds(allocator.slot_joined(S0, 2.0)) == [("Bind", A)]


class TestEventsThatCannotHappen:
    def test_they_are_refused_by_name_and_change_nothing(self) -> None:
        allocator = Allocator([S0], {A: 1})
        allocator.ready(A, 1.0)
        for event in ("ended", "suspended", "prefetched", "dropped"):
            with pytest.raises(ProtocolViolation, match=f"policy a was reported {event}, but it is binding"):
                getattr(allocator, event)(A, 1.0)
        with pytest.raises(ProtocolViolation, match="policy b is unknown to the pool, which has a"):
            allocator.ready(B, 1.0)
        with pytest.raises(ProtocolViolation, match="slot slot-1 was reported lost, but the pool has slot-0"):
            allocator.slot_lost(S1, 1.0)
        with pytest.raises(ProtocolViolation, match="slot slot-0 was reported joined"):
            allocator.slot_joined(S0, 1.0)
        with pytest.raises(ProtocolViolation, match="an event at 0.5 s was reported after one at 1.0 s"):
            allocator.bound(A, 0.5)
        assert kinds(allocator.bound(A, 1.0)) == [("Run", A)]
        allocator.ended(A, 2.0)
        with pytest.raises(ProtocolViolation, match="policy a was reported ended, but it is bound"):
            allocator.ended(A, 2.0)


def test_each_second_of_a_policy_counts_once() -> None:
    allocator = Allocator([S0], {A: 1, B: 1}, AllocatorConfig(states_per_slot=1))
    allocator.ready(A, 0.0)
    allocator.bound(A, 2.0)  # swapping 2
    allocator.ready(B, 3.0)
    allocator.ended(A, 7.0)  # computing 5
    allocator.suspended(A, 8.0)  # swapping 1
    allocator.bound(B, 11.0)
    allocator.ended(B, 12.0)
    allocator.slot_joined(S1, 15.0)
    a, b = allocator.seconds(A), allocator.seconds(B)
    assert (a.computing, a.idle, a.swapping, a.waiting, a.out) == (5.0, 0.0, 3.0, 0.0, 7.0)
    assert (b.computing, b.idle, b.swapping, b.waiting, b.out) == (1.0, 3.0, 3.0, 5.0, 3.0)
