"""The decisions to move instances between policies."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.inference.router.rebalancer import BalanceConfig, Move, MoveRules, PolicyLoad, Rebalancer
from flexmarl.actors.names import PolicyName

RULES = MoveRules()
BUSY, IDLE, OTHER = PolicyName("busy"), PolicyName("idle"), PolicyName("other")


def balancer(
    turn_s: float = 1.0, load_s: float = 0.0, rules: MoveRules = RULES, **settings: object
) -> Rebalancer:
    made = Rebalancer(BalanceConfig.model_validate({"scope": "intra+inter", **settings}), rules)
    for policy in (BUSY, IDLE, OTHER):
        made.turn_ended(policy, turn_s)
        made.loaded(policy, load_s)
    return made


def load(instances: int, turns: int, *, movable: int | None = None, capacity: int = 4) -> PolicyLoad:
    return PolicyLoad(instances, instances if movable is None else movable, capacity, turns)


def pairs(moves: list[Move]) -> list[tuple[str, str]]:
    return [(move.giver, move.taker) for move in moves]


class TestThreshold:
    def test_an_idle_policys_instance_moves_to_one_whose_turns_wait(self) -> None:
        moves = balancer().moves({BUSY: load(2, 40), IDLE: load(2, 0)})
        assert pairs(moves) == [(IDLE, BUSY)]
        assert moves[0].backlogs == (0.0, 20.0)
        assert "busy has 20.0 turns per instance, idle 0.0" in moves[0].reason

    def test_a_difference_up_to_the_threshold_moves_nothing(self) -> None:
        loads = {BUSY: load(2, 40), IDLE: load(4, 20)}
        assert balancer(threshold=15.0).moves(loads) == []
        assert pairs(balancer(threshold=14.0).moves(loads)) == [(IDLE, BUSY)]

    @pytest.mark.parametrize("scope", ["off", "intra"])
    def test_moves_are_off_by_config(self, scope: str) -> None:
        assert balancer(scope=scope).moves({BUSY: load(2, 40), IDLE: load(2, 0)}) == []

    def test_several_moves_at_once_split_the_idle_instances(self) -> None:
        moves = balancer().moves({BUSY: load(4, 200), IDLE: load(4, 0), OTHER: load(4, 0)})
        assert len(moves) == 6
        assert {move.taker for move in moves} == {BUSY}


class TestRescue:
    @pytest.mark.parametrize("turns", [0, 3])
    def test_a_policy_without_an_instance_gets_one_whether_turns_wait_or_not(self, turns: int) -> None:
        (rescue,) = balancer().rescues({BUSY: load(0, turns), IDLE: load(2, 0)})
        assert (rescue.giver, rescue.taker) == (IDLE, BUSY)
        assert rescue.reason == "busy has no instance, idle 0.0 turns per instance"

    def test_it_gets_one_of_a_policy_that_has_more_to_do_before_any_turn_was_measured(self) -> None:
        fresh = Rebalancer(BalanceConfig(scope="intra+inter"))
        loads = {BUSY: load(2, 400), IDLE: load(0, 1), OTHER: load(2, 500)}
        assert pairs(fresh.rescues(loads)) == [(BUSY, IDLE)]

    def test_each_gets_one_and_no_policy_gives_its_last(self) -> None:
        loads = {BUSY: load(0, 1), IDLE: load(2, 0, movable=1), OTHER: load(0, 0)}
        assert pairs(balancer().rescues(loads)) == [(IDLE, BUSY)]
        loads[IDLE] = load(3, 0, movable=2)
        assert pairs(balancer().rescues(loads)) == [(IDLE, BUSY), (IDLE, OTHER)]

    def test_other_policies_are_balanced_meanwhile(self) -> None:
        loads = {BUSY: load(2, 40), IDLE: load(2, 0), OTHER: load(0, 50)}
        assert pairs(balancer().moves(loads)) == [(IDLE, BUSY)]

    @pytest.mark.parametrize("scope", ["off", "intra"])
    def test_none_moves_if_moves_are_off(self, scope: str) -> None:
        assert balancer(scope=scope).rescues({BUSY: load(0, 3), IDLE: load(2, 0)}) == []


class TestCalm:
    def test_each_policy_keeps_its_minimum(self) -> None:
        loads = {BUSY: load(1, 1000), IDLE: load(3, 0)}
        assert len(balancer(min_instances=2).moves(loads)) == 1
        assert balancer(min_instances=3).moves(loads) == []

    def test_a_move_that_costs_more_than_it_saves_is_not_made(self) -> None:
        loads = {BUSY: load(2, 40), IDLE: load(2, 0)}  # 5 s with two instances, 3.3 s with three
        assert pairs(balancer(load_s=1.0).moves(loads)) == [(IDLE, BUSY)]
        assert balancer(load_s=10.0).moves(loads) == []

    def test_turns_that_all_run_already_need_no_further_instance(self) -> None:
        assert balancer().moves({BUSY: load(1, 16, capacity=16), IDLE: load(2, 0)}) == []

    def test_an_instance_that_has_just_moved_stays(self) -> None:
        assert balancer().moves({BUSY: load(2, 40), IDLE: load(2, 0, movable=0)}) == []

    def test_the_time_to_stay_is_a_multiple_of_the_measured_cost(self) -> None:
        assert balancer(load_s=1.5, rules=MoveRules(settle=4.0)).settle_s(IDLE, BUSY) == 6.0
        assert Rebalancer(BalanceConfig()).settle_s(IDLE, BUSY) == 0.0

    def test_nothing_moves_before_the_first_turn_has_been_measured(self) -> None:
        fresh = Rebalancer(BalanceConfig(scope="intra+inter"))
        assert fresh.moves({BUSY: load(2, 40), IDLE: load(2, 0)}) == []
        fresh.turn_ended(BUSY, 1.0)
        assert fresh.moves({BUSY: load(2, 40), IDLE: load(2, 1)}) == []
        assert pairs(fresh.moves({BUSY: load(2, 40), IDLE: load(2, 0)})) == [(IDLE, BUSY)]

    def test_measurements_are_rolling_means(self) -> None:
        made = balancer(load_s=10.0)
        loads = {BUSY: load(2, 40), IDLE: load(2, 0)}
        assert made.moves(loads) == []
        for _ in range(20):
            made.loaded(BUSY, 0.5)
        assert pairs(made.moves(loads)) == [(IDLE, BUSY)]


@st.composite
def loads_of_policies(draw: st.DrawFn) -> dict[PolicyName, PolicyLoad]:
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True))
    loads = {}
    for name in names:
        instances = draw(st.integers(0, 20))
        loads[PolicyName(name)] = PolicyLoad(
            instances, draw(st.integers(0, instances)), draw(st.integers(1, 64)), draw(st.integers(0, 1000))
        )
    return loads


@given(
    loads_of_policies(),
    st.floats(0.01, 100.0),
    st.floats(0.0, 100.0),
    st.integers(1, 3),
    st.floats(0.1, 20.0),
)
def test_moves_keep_the_rules(
    loads: dict[PolicyName, PolicyLoad], turn_s: float, load_s: float, minimum: int, threshold: float
) -> None:
    config = BalanceConfig(scope="intra+inter", min_instances=minimum, threshold=threshold)
    made = Rebalancer(config)
    for policy in loads:
        made.turn_ended(policy, turn_s)
        made.loaded(policy, load_s)
    instances = {policy: one.instances for policy, one in loads.items()}
    left = {policy: one.movable for policy, one in loads.items()}
    for move in made.moves(loads):
        giver, taker = loads[move.giver], loads[move.taker]
        assert _per_instance(taker.turns, instances[move.taker]) > threshold + _per_instance(
            giver.turns, instances[move.giver]
        )
        instances[move.giver] -= 1
        instances[move.taker] += 1
        left[move.giver] -= 1
        assert instances[move.giver] >= minimum
        assert left[move.giver] >= 0
        assert _per_instance(giver.turns, instances[move.giver]) <= _per_instance(
            taker.turns, instances[move.taker]
        )
        assert move.saves_s > 0
    assert sum(instances.values()) == sum(one.instances for one in loads.values())
    settled = {
        policy: PolicyLoad(instances[policy], left[policy], one.capacity, one.turns)
        for policy, one in loads.items()
    }
    assert made.moves(settled) == []  # all that is to be moved is moved at once, nothing back


def _per_instance(turns: int, instances: int) -> float:
    if instances:
        return turns / instances
    return math.inf if turns else 0.0
