"""The slots of a policy that may have fewer ranks than it has at most."""

from flexmarl.actors.names import PolicyName, SlotName
from flexmarl.actors.trainer.allocate import Allocator
from flexmarl.actors.trainer.gangs import Bind
from flexmarl.actors.trainer.slot_choice import AllocatorConfig

from .pool_owner import kinds

A, B = PolicyName("a"), PolicyName("b")
S0, S1, S2, S3 = (SlotName(f"slot-{n}") for n in range(4))


def allocator_of(ranks: int, fewest: int, slots: int = 3) -> Allocator:
    names = [S0, S1, S2, S3][:slots]
    return Allocator(names, {A: ranks, B: 2}, AllocatorConfig(states_per_slot=1), {A: fewest})


def test_it_has_all_its_ranks_if_as_many_slots_are_without_work() -> None:
    allocator = allocator_of(3, 1)
    allocator.ready(B, 0.0)
    allocator.bound(B, 0.0)
    allocator.ended(B, 1.0)
    decisions = allocator.ready(A, 2.0)
    assert kinds(decisions) == [("Suspend", B)]
    (bind,) = allocator.suspended(B, 3.0)
    assert isinstance(bind, Bind) and bind.slots == (S0, S1, S2)


def test_it_is_resumed_on_those_that_others_leave_free() -> None:
    allocator = allocator_of(3, 1)
    allocator.ready(A, 0.0)
    allocator.bound(A, 0.0)
    allocator.ready(B, 0.5)
    assert kinds(allocator.ended(A, 1.0)) == [("Suspend", A)]
    assert kinds(allocator.suspended(A, 1.0)) == [("Bind", B)]
    allocator.bound(B, 1.0)
    (bind,) = allocator.ready(A, 1.5)
    assert isinstance(bind, Bind) and bind.slots == (S2,), "B computes on the others"


def test_not_with_fewer_than_its_fewest() -> None:
    allocator = allocator_of(3, 2)
    allocator.ready(B, 0.0)
    allocator.bound(B, 0.0)
    assert allocator.ready(A, 1.0) == [], "one slot is free"
    assert kinds(allocator.ended(B, 2.0)) == [("Suspend", B)]
    (bind,) = allocator.suspended(B, 3.0)
    assert isinstance(bind, Bind) and bind.slots == (S0, S1, S2)


def test_a_pool_that_has_lost_slots_is_enough() -> None:
    allocator = allocator_of(3, 2)
    allocator.slot_lost(S1, 0.0)
    (bind,) = allocator.ready(A, 1.0)
    assert isinstance(bind, Bind) and bind.slots == (S0, S2)
