"""The slots of a policy that may have fewer ranks than it has at most."""

from flexmarl.actors.names import PolicyName, SlotName
from flexmarl.actors.trainer.pool.allocate import Allocator
from flexmarl.actors.trainer.pool.gangs import Bind, Run, Suspend
from flexmarl.actors.trainer.pool.slot_choice import AllocatorConfig

from ..pool_owner import Owner, kinds

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


class TestGrowth:
    """A has up to 2 ranks; B leaves it one slot of two at first."""

    def shrunk(self, *, copy_s: float = 1.0, hysteresis: float = 2.0) -> Owner:
        config = AllocatorConfig(hysteresis=hysteresis)
        owner = Owner(2, {A: 2, B: 1}, config, copy_s=copy_s, fewest={A: 1})
        owner.ready(B, 3)
        owner.ready(A, 30)
        while owner.count(Run, B) < 3:
            owner.advance()
        assert self.slots(owner) == [1], "B has work"
        return owner

    @staticmethod
    def slots(owner: Owner) -> list[int]:
        return [len(one.slots) for one in owner.decisions if isinstance(one, Bind) and one.policy == A]

    def test_a_policy_on_fewer_slots_moves_to_more_when_they_are_without_work(self) -> None:
        owner = self.shrunk()
        owner.finish()
        assert self.slots(owner) == [1, 2]
        (left,) = [one for one in owner.decisions if isinstance(one, Suspend) and one.policy == A]
        assert "1 more slots are without work" in left.reason and "on 1 of 2 ranks" in left.reason
        assert owner.count(Run, A) == 30

    def test_not_before_it_has_lost_as_much_time_as_the_move_takes(self) -> None:
        begun = []
        for hysteresis in (1.0, 4.0):
            owner = self.shrunk(hysteresis=hysteresis)
            while not owner.count(Suspend, A):
                owner.advance()
            begun.append(owner.count(Run, A))
        # The copies out and in take 1 s each, as far as they are measured; half of each computation of 1 s is lost.
        assert begun == [3, 9]

    def test_not_for_a_little_work(self) -> None:
        owner = self.shrunk(copy_s=20.0)
        owner.finish()
        assert self.slots(owner) == [1]

    def test_not_while_another_policy_waits(self) -> None:
        owner = self.shrunk()
        while not owner.count(Suspend, A):
            owner.ready(B)
            owner.advance()
            if owner.now > 25.0:
                break
        assert owner.count(Suspend, A) == 0


class TestReplicas:
    """A has two replicas of two ranks on six slots, of which each two are neighbours; B has one rank, and C another."""

    C = PolicyName("c")
    SLOTS = tuple(SlotName(f"slot-{n}") for n in range(6))

    def allocator(self) -> Allocator:
        config = AllocatorConfig(states_per_slot=1)
        return Allocator(self.SLOTS, {A: 4, B: 1, self.C: 1}, config, replica_sizes={A: 2})

    def bound(self, allocator: Allocator, policy: PolicyName, now: float) -> tuple[SlotName, ...]:
        (bind,) = allocator.ready(policy, now)
        assert isinstance(bind, Bind)
        return bind.slots

    def test_the_slots_of_a_replica_are_neighbours(self) -> None:
        allocator = self.allocator()
        assert self.bound(allocator, B, 0.0) == self.SLOTS[:1]
        assert self.bound(allocator, A, 1.0) == self.SLOTS[2:], "not slot-1, whose neighbour computes"

    def test_without_enough_neighbours_any_slots_do(self) -> None:
        allocator = self.allocator()
        allocator.slot_lost(self.SLOTS[3], 0.0)
        assert self.bound(allocator, B, 1.0) == self.SLOTS[:1]
        assert self.bound(allocator, A, 2.0) == (self.SLOTS[1], self.SLOTS[2], *self.SLOTS[4:])

    def test_a_slot_that_comes_back_has_its_neighbour(self) -> None:
        allocator = self.allocator()
        for slot in (self.SLOTS[2], self.SLOTS[0]):
            allocator.slot_lost(slot, 0.0)
        for slot in (self.SLOTS[0], self.SLOTS[2]):
            allocator.slot_joined(slot, 1.0)
        assert self.bound(allocator, A, 2.0) == self.SLOTS[:4]


def test_of_slots_that_are_as_good_those_of_the_hosts_of_its_state_come_first() -> None:
    slots = [S0, S1, S2, S3]
    hosts = dict(zip(slots, ("near", "near", "far", "far"), strict=True))
    allocator = Allocator(slots, {A: 2, B: 4}, AllocatorConfig(states_per_slot=1), hosts=hosts)
    allocator.ready(A, 0.0)
    allocator.bound(A, 0.0)
    allocator.ended(A, 1.0)
    assert kinds(allocator.ready(B, 1.0)) == [("Suspend", A)]
    assert kinds(allocator.suspended(A, 2.0, homes=["far"])) == [("Bind", B)]
    allocator.bound(B, 2.0)
    allocator.ended(B, 3.0)
    assert kinds(allocator.ready(A, 3.0)) == [("Suspend", B)]
    (bind,) = allocator.suspended(B, 4.0, homes=["near", "far"])
    assert isinstance(bind, Bind) and bind.slots == (S2, S3)
