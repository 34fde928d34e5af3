"""Instances that serve several policies at the same time, as the router sees them."""

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.inference.router.instance_states import InstanceState
from flexmarl.actors.inference.router.rebalancer import BalanceConfig, MoveRules
from flexmarl.actors.inference.router.router import Router
from flexmarl.actors.inference.router.router_config import RouterConfig
from flexmarl.actors.inference.router.router_decisions import (
    Changed,
    Decision,
    Installed,
    Load,
    Moved,
    NoInstances,
    Probe,
    Route,
)
from flexmarl.actors.inference.router.router_loads import RebalanceSettings
from flexmarl.actors.messages import RouteRequest
from flexmarl.actors.names import PolicyName, Version

A, B, C = PolicyName("a"), PolicyName("b"), PolicyName("c")
CONFIG = RouterConfig(load_timeout_s=50.0, return_timeout_s=80.0)


def asked(turn: int, policy: PolicyName, version: int = 0, **more: Any) -> RouteRequest:
    values: dict[str, Any] = {"prompt_tokens": 10, "downstream_tokens": 0.0, "prefix": f"own {turn}"} | more
    return RouteRequest(turn, policy, Version(version), Version(version), **values)


def serving(capacities: dict[str, int], policies: tuple[PolicyName, ...] = (A, B)) -> Router:
    """Instances by name that all serve version 0 of all ``policies``."""
    router = Router([A, B, C], CONFIG)
    numbers = {name: router.joined(name, policies, capacity, 0.0) for name, capacity in capacities.items()}
    for part, policy in enumerate(policies):
        router.published(policy, Version(0), 0.0)
        for parts in numbers.values():
            router.loaded(parts[part], Version(0), 0.0)
    router.decisions(0.0)
    return router


def routes(decided: list[Decision], router: Router) -> dict[int, str]:
    return {d.routed.turn: router.name_of(d.routed.instance) for d in decided if isinstance(d, Route)}


def test_the_turns_of_all_policies_fill_one_instance() -> None:
    router = serving({"x": 3})
    for turn, policy in enumerate((A, B, A, B)):
        router.requested(1, asked(turn, policy), 0.0)
    assert routes(router.decisions(0.0), router) == {0: "x", 1: "x", 2: "x"}
    router.ended(1, 0, 5, 1.0)
    assert routes(router.decisions(1.0), router) == {3: "x"}, "the end of a turn of a makes room for one of b"


def test_a_turn_goes_to_the_instance_with_the_fewest_tokens_of_all_policies() -> None:
    router = serving({"x": 8, "y": 8})
    router.requested(1, asked(0, A, prompt_tokens=1000), 0.0)
    assert routes(router.decisions(0.0), router) == {0: "x"}
    for turn in (1, 2):
        router.requested(1, asked(turn, B), 0.0)
    assert routes(router.decisions(0.0), router) == {1: "y", 2: "y"}


def test_of_the_turns_that_wait_for_room_the_first_in_line_is_first_whatever_its_policy() -> None:
    router = serving({"x": 1})
    order = [A, B, B, A, B, A]
    for turn, policy in enumerate(order):
        router.requested(1, asked(turn, policy), float(turn))
    got: list[int] = []
    for turn in range(len(order)):
        got += routes(router.decisions(10.0 + turn), router)
        router.ended(1, got[-1], 5, 10.0 + turn)
    assert got == list(range(len(order)))


def test_a_version_of_one_policy_stops_no_turns_of_the_others() -> None:
    router = serving({"x": 8})
    router.published(A, Version(1), 1.0)
    (load,) = router.decisions(1.0)
    assert load == Load(router.numbers_of("x")[0], A, Version(1))
    router.requested(1, asked(1, A, 1), 1.0)
    router.requested(1, asked(2, B), 1.0)
    (route,) = router.decisions(1.0)
    assert isinstance(route, Route) and (route.routed.turn, route.routed.version) == (2, 0)
    router.loaded(load.instance, Version(1), 2.0)
    decided = router.decisions(2.0)
    assert routes(decided, router) == {1: "x"} and Installed(A, Version(1)) in decided


def test_turns_that_a_version_interrupts_make_room_for_those_of_other_policies() -> None:
    router = serving({"x": 1})
    router.requested(1, asked(1, A), 0.0)
    router.decisions(0.0)
    router.requested(1, asked(2, B), 0.0)
    router.published(A, Version(1), 1.0)
    assert not routes(router.decisions(1.0), router)
    router.ended(1, 1, 5, 1.0)
    assert routes(router.decisions(1.0), router) == {2: "x"}


def test_the_loss_of_an_instance_is_the_loss_of_all_its_policies() -> None:
    router = serving({"x": 8})
    first, second = router.numbers_of("x")
    for turn, policy in enumerate((A, B)):
        router.requested(1, asked(turn, policy), 0.0)
    router.decisions(0.0)
    router.suspected(second, "silent", 1.0)
    decided = router.decisions(1.0)
    assert [d for d in decided if isinstance(d, Probe)] == [Probe(first), Probe(second)]
    router.trusted(first, Version(0), 2.0)
    router.requested(1, asked(2, A), 2.0)
    router.requested(1, asked(3, B), 2.0)
    assert routes(router.decisions(2.0), router) == {2: "x"}, "b has not answered yet"
    router.lost(first, "killed", 3.0)
    gone = [d for d in router.decisions(3.0) if isinstance(d, Changed)]
    assert [(d.policy, d.state) for d in gone] == [(A, InstanceState.GONE), (B, InstanceState.GONE)]
    assert router.numbers_of("x") == [] and router.first_number(second) is None
    router.session_ended(1, 4.0)
    assert {d.policy for d in router.decisions(90.0) if isinstance(d, NoInstances)} == {A, B}


def test_a_policy_that_an_instance_can_not_load_leaves_the_others_there() -> None:
    router = serving({"x": 1})
    first, second = router.numbers_of("x")
    router.requested(1, asked(1, B), 0.0)
    router.decisions(0.0)
    router.failed(second, "LoadFailed: digest", 1.0)
    assert NoInstances(B, 0.0, "x: LoadFailed: digest") in router.decisions(1.0)
    assert router.numbers_of("x") == [first] and router.first_number(second) == first
    router.requested(1, asked(2, A), 1.0)
    assert routes(router.decisions(1.0), router) == {2: "x"}, "the turn of b has left its place"
    router.lost(second, "killed", 2.0)
    assert router.numbers_of("x") == []


def test_one_that_is_started_again_joins_with_all_its_policies() -> None:
    router = serving({"x": 1})
    parts = router.joined("x", (A, B), 1, 5.0)
    loads = [d for d in router.decisions(5.0) if isinstance(d, Load)]
    assert loads == [Load(parts[0], A, Version(0)), Load(parts[1], B, Version(0))]


def test_shared_instances_do_not_move() -> None:
    balance = BalanceConfig(scope="intra+inter", threshold=0.5)
    router = Router([A, B, C], CONFIG, RebalanceSettings(balance, rules=MoveRules(margin=0.0, settle=0.0)))
    numbers = {name: router.joined(name, (A, B), 1, 0.0) for name in "xy"}
    numbers |= {name: router.joined(name, (C,), 1, 0.0) for name in "vw"}
    for policy in (A, B, C):
        router.published(policy, Version(0), 0.0)
    for parts in numbers.values():
        for number in parts:
            router.loaded(number, Version(0), 0.5)
    for turn in range(20):
        router.requested(1, asked(turn, (A, C)[turn % 2]), 1.0)
    router.decisions(1.0)
    for turn in range(2):
        router.ended(1, turn, 5, 2.0)
    for _ in range(3):
        router.balance(3.0)
        assert not any(isinstance(d, Moved) for d in router.decisions(3.0))
    for name in "xy":
        router.lost(numbers[name][0], "killed", 4.0)
    router.balance(4.0)
    assert not any(isinstance(d, Moved) for d in router.decisions(4.0)), "a and b wait for x or y"


@pytest.mark.parametrize("seed", range(3))
def test_figures_of_an_instance_count_the_turns_of_all_its_policies(seed: int) -> None:
    router, random = serving({"x": 4}), Random(seed)
    for turn in range(40):
        router.requested(1, asked(turn, random.choice([A, B])), float(turn))
        router.decisions(float(turn))
        router.ended(1, turn, 3, turn + 0.5)
    for turn in range(40, 47):  # x has room for four
        router.requested(1, asked(turn, A), 50.0)
    router.decisions(50.0)
    found = router.statistics()
    assert (found["policy_waiting.a"], found["policy_waiting.b"]) == (3.0, 0.0)
    assert (found["turns.x"], found["service_s.x"]) == (40.0, 20.0)
    of_a, of_b = (
        {kind: found[f"policy_{kind}.{policy}"] for kind in ("turns", "service_s")} for policy in (A, B)
    )
    assert of_a["turns"] == 2 * of_a["service_s"] > 0.0, "each turn takes half a second"
    assert {kind: of_a[kind] + of_b[kind] for kind in of_a} == {"turns": 40.0, "service_s": 20.0}


# --------------------------------------------------------------------------- any order of events


@dataclass
class Books:
    """Own books of a router with instances ``x`` and ``y`` of a and b, and ``z`` of c."""

    router: Router
    waiting: dict[int, PolicyName]
    at: dict[int, int]
    served: dict[int, PolicyName]
    loading: dict[int, tuple[PolicyName, Version]]

    def follow(self, now: float) -> None:
        for decision in self.router.decisions(now):
            match decision:
                case Route(_, routed):
                    assert self.served[routed.instance] == self.waiting.pop(routed.turn)
                    self.at[routed.turn] = routed.instance
                case Load(number, policy, version):
                    self.served.pop(number, None)
                    self.loading[number] = (policy, version)
                case Changed(number, _, _, InstanceState.GONE):
                    for books in (self.served, self.loading):
                        books.pop(number, None)
                    self.at = {turn: at for turn, at in self.at.items() if at != number}

    def check(self, capacity: int) -> None:
        for name in "xyz":
            numbers = self.router.numbers_of(name)
            turns = sum(at in numbers for at in self.at.values())
            assert turns <= capacity
            served = {self.served[number] for number in numbers if number in self.served}
            # While instances of a policy load, those that serve it have their share of its turns alone.
            settled = served - {policy for policy, _ in self.loading.values()}
            if turns < capacity:
                assert not settled & set(self.waiting.values()), "a turn waits that could be routed"


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_in_any_order_of_events_places_are_used_and_all_turns_are_routed(
    random: Random, capacity: int
) -> None:
    router = Router([A, B, C], CONFIG)
    books = Books(router, {}, {}, {}, {})
    for name, policies in {"x": (A, B), "y": (A, B), "z": (C,)}.items():
        router.joined(name, policies, capacity, 0.0)
    versions = dict.fromkeys((A, B, C), -1)
    next_turn = 0

    def publish(policy: PolicyName, now: float) -> None:
        versions[policy] += 1
        router.published(policy, Version(versions[policy]), now)

    def load(now: float) -> None:
        number = random.choice(sorted(books.loading))
        policy, version = books.loading.pop(number)
        books.served[number] = policy
        router.loaded(number, version, now)

    def end(turn: int, now: float) -> None:
        if books.at.pop(turn, None) is None:
            books.waiting.pop(turn)
        router.ended(1, turn, 3, now)

    for step in range(60):
        now, event = (
            float(step),
            random.choice(["ask", "ask", "ask", "end", "end", "load", "publish", "lose"]),
        )
        turns = sorted([*books.waiting, *books.at])
        if event == "ask":
            policy, next_turn = random.choice([A, B, C]), next_turn + 1
            router.requested(1, asked(next_turn, policy)._replace(newest=None), now)
            books.waiting[next_turn] = policy
        elif event == "end" and turns:
            end(random.choice(turns), now)
        elif event == "load" and books.loading:
            load(now)
        elif event == "publish":
            publish(random.choice([A, B, C]), now)
        elif event == "lose":
            name = random.choice("xyz")
            router.lost(random.choice(router.numbers_of(name)), "killed", now)
            books.follow(now)
            router.joined(name, (C,) if name == "z" else (A, B), capacity, now)
        books.follow(now)
        books.check(capacity)
    for policy in (A, B, C):
        publish(policy, 60.0)
    books.follow(60.0)
    while books.loading:
        load(61.0)
        books.follow(61.0)
    while books.waiting:
        assert books.at, "turns wait at idle instances"
        end(min(books.at), 62.0)
        books.follow(62.0)
