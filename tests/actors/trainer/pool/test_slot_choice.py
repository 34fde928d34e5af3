"""The slots of a policy that may have fewer ranks than it has at most."""

from collections.abc import Callable

from flexmarl.actors.names import PolicyName, SlotName
from flexmarl.actors.trainer.pool.allocate import Allocator
from flexmarl.actors.trainer.pool.gangs import Bind, Drop, Run, Suspend
from flexmarl.actors.trainer.pool.slot_choice import AllocatorConfig

from ..pool_owner import Owner, kinds

A, B, C = (PolicyName(name) for name in "abc")
S0, S1, S2, S3 = (SlotName(f"slot-{n}") for n in range(4))


def allocator_of(ranks: int, fewest: int, slots: int = 3) -> Allocator:
    """The slots are too few for A, B and C at once."""
    names = [S0, S1, S2, S3][:slots]
    return Allocator(names, {A: ranks, B: 2, C: 2}, AllocatorConfig(states_per_slot=1), {A: fewest})


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


class TestShares:
    """A and B may have 1 to 4 ranks, on four slots."""

    def owner(self, *, copy_s: float = 1.0, seconds: Callable[[PolicyName], float] = lambda _: 1.0) -> Owner:
        return Owner(4, {A: 4, B: 4}, copy_s=copy_s, compute_s=seconds, fewest={A: 1, B: 1})

    @staticmethod
    def sizes(owner: Owner, policy: PolicyName) -> list[int]:
        return [len(one.slots) for one in owner.decisions if isinstance(one, Bind) and one.policy == policy]

    def test_policies_with_work_compute_at_once(self) -> None:
        owner = self.owner()
        for policy in (A, B):
            owner.ready(policy, 3)
        assert owner.finish() == 4.0, "a copy and three computations: none has waited for the other"
        assert self.sizes(owner, A) == self.sizes(owner, B) == [2] and owner.count(Suspend) == 0

    def test_one_with_more_work_than_its_slots_moves_to_its_share_when_others_have_none(self) -> None:
        owner = self.owner(copy_s=0.5, seconds=lambda policy: 3.0 if policy == A else 1.0)
        for _ in range(6):
            for policy, count in ((B, 1), (A, 2)):
                owner.ready(policy, count)
                owner.finish()
        assert self.sizes(owner, A) == [2, 3] and self.sizes(owner, B) == [2, 1]
        (left,) = [one for one in owner.decisions if isinstance(one, Suspend) and one.policy == A]
        assert "on 2 of 3 ranks" in left.reason

    def test_not_at_the_moment_at_which_its_samples_come(self) -> None:
        owner = self.owner(copy_s=0.5, seconds=lambda policy: 3.0 if policy == A else 1.0)
        for _ in range(6):
            owner.now += 10.0
            for policy in (A, B):
                owner.ready(policy)
            owner.finish()
        assert owner.count(Suspend) == 0, "the samples of the other come at the same moment"

    def test_nor_because_rollouts_take_longer_than_ever(self) -> None:
        owner = self.owner(copy_s=0.5)
        owner.step(A, B)  # they are bound when the run begins
        for rollout_s in (10.0, 10.0, 50.0):
            owner.finish()
            owner.now += rollout_s
            owner.ready(A, 4)
            if rollout_s == 10.0:
                owner.ready(B, 4)
        owner.finish()
        assert owner.count(Suspend) == 0, "B was without work for long, but A was too"

    def test_slots_of_a_policy_that_will_have_work_again_are_not_taken(self) -> None:
        owner = self.owner(copy_s=0.5)
        for _ in range(20):
            for policy in (A, B):
                owner.ready(policy)
                owner.finish()
        assert owner.count(Suspend) == 0

    def test_one_on_more_than_its_share_makes_room_for_one_that_waits(self) -> None:
        owner = self.owner(copy_s=0.5)
        owner.ready(A, 2)
        owner.ready(B, 2)
        owner.finish()
        owner.ready(A, 40)
        while self.sizes(owner, A) == [2]:
            owner.advance()
        while owner.count(Run, A) < 20:
            owner.advance()
        assert self.sizes(owner, A) == [2, 4], "B has had no work for long"
        owner.ready(B, 2)
        owner.finish()
        assert self.sizes(owner, B)[-1] >= 1 and owner.count(Run, B) == 4
        left = [one.reason for one in owner.decisions if isinstance(one, Suspend) and one.policy == A]
        assert any("it has 4 slots, and its share is 3; b has waited" in reason for reason in left), left


class TestDivision:
    """A and B may have 1 to 4 ranks, on four slots. A computation of A takes 3 s, and one of B 1 s."""

    def owner(self, *, copy_s: float = 0.5, fewest: int = 1) -> Owner:
        def seconds(policy: PolicyName) -> float:
            return 3.0 if policy == A else 1.0

        owner = Owner(4, {A: 4, B: 4}, copy_s=copy_s, compute_s=seconds, fewest={A: fewest, B: fewest})
        owner.step(A, B)  # they are bound when the run begins
        owner.finish()
        return owner

    @staticmethod
    def play_step(owner: Owner, *, rollout_s: float = 10.0) -> None:
        owner.now += rollout_s
        for policy in (A, B):
            owner.ready(policy)
        owner.step(A, B)
        owner.finish()

    def test_between_two_steps_all_policies_move_to_their_shares(self) -> None:
        owner = self.owner()
        self.play_step(owner)
        assert kinds(owner.decisions)[-4:] == [("Suspend", A), ("Suspend", B), ("Bind", A), ("Bind", B)]
        sizes = {one.policy: len(one.slots) for one in owner.decisions if isinstance(one, Bind)}
        assert sizes == {A: 3, B: 1}
        (reason,) = {one.reason for one in owner.decisions if isinstance(one, Suspend)}
        assert reason == "no policy has work, and a has 2 slots of its share of 3"

    def test_once(self) -> None:
        owner = self.owner()
        for _ in range(5):
            self.play_step(owner)
        assert owner.count(Suspend) == 2

    def test_not_within_a_step(self) -> None:
        owner = self.owner()
        for _ in range(3):
            owner.now += 10.0
            for policy in (A, B):
                owner.ready(policy)
            owner.finish()
        assert owner.count(Suspend) == 0, "their gradients would move too"

    def test_not_if_a_move_takes_longer_than_the_rollouts(self) -> None:
        owner = self.owner(copy_s=8.0)
        self.play_step(owner, rollout_s=5.0)
        assert owner.count(Suspend) == 0

    def test_not_if_policies_take_turns(self) -> None:
        owner = self.owner(fewest=2)
        for _ in range(3):
            self.play_step(owner)
        reasons = [one.reason for one in owner.decisions if isinstance(one, Suspend)]
        assert not [reason for reason in reasons if "no policy has work" in reason], (
            "nothing is left to divide"
        )

    def test_work_that_comes_meanwhile_is_not_late(self) -> None:
        owner = self.moving()
        owner.ready(B)
        owner.finish()
        assert self.sizes(owner) == {A: 3, B: 1} and owner.count(Run, B) == 4

    def test_a_slot_that_is_lost_meanwhile_leaves_the_others(self) -> None:
        owner = self.moving()
        decisions = owner.allocator.slot_lost(S3, owner.now)
        (drop,) = [one for one in decisions if isinstance(one, Drop)]
        owner.queue = [event for event in owner.queue if event[3] != drop.policy]
        owner.carry_out(decisions)
        owner.finish()
        assert self.sizes(owner) == {A: 2, B: 1}

    @staticmethod
    def sizes(owner: Owner) -> dict[PolicyName, int]:
        return {one.policy: len(one.slots) for one in owner.decisions if isinstance(one, Bind)}

    def moving(self) -> Owner:
        """Both leave their slots."""
        owner = self.owner()
        owner.now += 10.0
        for policy in (A, B):
            owner.ready(policy)
        owner.step(A, B)
        while not owner.count(Suspend):
            owner.advance()
        return owner


class TestReplicas:
    """A has two replicas of two ranks on six slots, of which each two are neighbours; B has one rank, and C another."""

    SLOTS = tuple(SlotName(f"slot-{n}") for n in range(6))

    def allocator(self) -> Allocator:
        config = AllocatorConfig(states_per_slot=1)
        return Allocator(self.SLOTS, {A: 4, B: 1, C: 1}, config, replica_sizes={A: 2})

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
