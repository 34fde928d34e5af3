"""The router's rules, one case each; ``test_router_storm.py`` has any order of events."""

import math
from typing import Any

import pytest

from flexmarl.actors.inference.router.instance_states import TRANSITIONS, InstanceEvent, InstanceState
from flexmarl.actors.inference.router.rebalancer import BalanceConfig
from flexmarl.actors.inference.router.router import Router
from flexmarl.actors.inference.router.router_decisions import (
    Changed,
    Installed,
    Load,
    Moved,
    NoInstances,
    Probe,
    Refuse,
    Route,
)
from flexmarl.actors.inference.router.router_loads import RebalanceSettings
from flexmarl.actors.messages import RouteAssigned
from flexmarl.actors.names import Version

from .router_events import CONFIG, A, B, asked, routes, serving


def test_turns_go_to_the_instance_with_the_fewest_expected_tokens() -> None:
    router = serving({"x": 8, "y": 8})
    router.requested(1, asked(1, prompt_tokens=100), 0.0)
    assert routes(router) == {1: "x"}
    for turn in range(2, 6):
        router.requested(1, asked(turn, prompt_tokens=24), 0.0)
    assert routes(router) == dict.fromkeys(range(2, 6), "y")
    router.requested(1, asked(6), 0.0)
    assert routes(router) == {6: "y"}, "101 tokens are expected at x, 100 at y"
    router.ended(1, 1, 0, 1.0)
    router.requested(1, asked(7), 1.0)
    assert routes(router, 1.0) == {7: "x"}


def test_the_tokens_that_turns_generate_are_expected_of_later_ones() -> None:
    router = serving({"x": 8, "y": 8})
    router.requested(1, asked(1), 0.0)
    assert routes(router) == {1: "x"}
    router.ended(1, 1, 200, 4.0)
    router.requested(1, asked(2, prompt_tokens=10), 4.0)
    assert routes(router, 4.0) == {2: "x"}
    router.requested(1, asked(3, prompt_tokens=200), 4.0)
    router.requested(1, asked(4, prompt_tokens=1), 4.0)
    assert routes(router, 4.0) == {3: "y", 4: "x"}, "210 tokens at x, 400 at y"


def test_a_turn_waits_for_room_and_for_its_version() -> None:
    router = serving({"x": 2})
    for turn in range(4):
        router.requested(1, asked(turn), 1.0)
    router.requested(1, asked(4, oldest=1, newest=1), 1.0)
    assert routes(router, 1.0) == {0: "x", 1: "x"}
    router.ended(1, 0, 5, 3.0)
    (route,) = router.decisions(3.0)
    assert isinstance(route, Route) and route == (1, RouteAssigned(2, 1, Version(0), 0.0, 2.0))
    router.ended(1, 1, 5, 4.0)
    router.ended(1, 2, 5, 4.0)
    assert routes(router, 4.0) == {3: "x"}
    router.published(A, Version(1), 5.0)
    (load,) = router.decisions(5.0)
    assert isinstance(load, Load)
    router.loaded(load.instance, Version(1), 9.0)
    route, installed = router.decisions(9.0)
    assert isinstance(route, Route) and route == (1, RouteAssigned(4, 1, Version(1), 8.0, 0.0))
    assert installed == Installed(A, Version(1))


def test_a_turn_that_no_later_version_may_generate_is_refused() -> None:
    router = serving({"x": 1})
    for turn in range(3):
        router.requested(1, asked(turn, newest=None if turn == 2 else 0), 0.0)
    assert routes(router) == {0: "x"}
    router.published(A, Version(1), 1.0)
    assert [d for d in router.decisions(1.0) if isinstance(d, Refuse)] == [Refuse((1, 1), Version(1))]
    router.requested(1, asked(3), 1.0)
    assert router.decisions(1.0) == [Refuse((1, 3), Version(1))]


def test_the_turn_with_more_work_behind_it_goes_first_but_not_for_ever() -> None:
    router = serving({"x": 1})
    router.requested(1, asked(0), 0.0)
    assert routes(router) == {0: "x"}
    router.ended(1, 0, 100, 10.0)  # 0.1 s for a token
    router.requested(1, asked(1), 10.0)
    assert routes(router, 10.0) == {1: "x"}
    router.requested(1, asked(2), 10.0)
    router.requested(1, asked(3, downstream_tokens=50.0), 12.0)
    router.requested(1, asked(4, downstream_tokens=50.0), 20.0)
    order = []
    for previous in (1, 3, 2):
        router.ended(1, previous, 0, 30.0)
        order += list(routes(router, 30.0))
    assert order == [3, 2, 4], "5 s are behind turns 3 and 4; turn 4 came 10 s after turn 2"


def test_the_instance_that_knows_the_prompt_is_preferred_while_that_may_pay() -> None:
    router = serving({"x": 9, "y": 9})
    found: dict[int, str] = {}
    for turn, tokens, prefix in ((1, 100, "same"), (2, 60, "own"), (3, 100, "same"), (4, 100, "same")):
        router.requested(1, asked(turn, prompt_tokens=tokens, prefix=prefix), 0.0)
        found |= routes(router)
    assert found == {1: "x", 2: "y", 3: "x", 4: "y"}, (
        "then 202 tokens are expected at x, 61 at y: too many more"
    )


def test_the_first_to_acknowledge_a_version_takes_its_share_alone() -> None:
    router = Router([A, B], CONFIG)
    numbers = [router.joined(name, (A,), 64, 0.0)[0] for name in "wxyz"]
    router.published(A, Version(0), 0.0)
    for turn in range(40):
        router.requested(1, asked(turn), 0.0)
    router.decisions(0.0)
    for number in numbers:
        router.loaded(number, Version(0), 1.0)
        assert len(routes(router, 1.0)) == 10


def test_publishing_leaves_out_one_that_dies_and_one_that_does_not_acknowledge() -> None:
    router = serving({"x": 1, "y": 1, "z": 1})
    router.published(A, Version(1), 10.0)
    loads = {d.instance for d in router.decisions(10.0) if isinstance(d, Load)}
    x, y, z = sorted(loads)
    router.loaded(x, Version(1), 11.0)
    router.lost(y, "killed", 12.0)
    decided = router.decisions(12.0)
    assert [type(d) for d in decided] == [Changed] and router.due_s == 60.0
    overdue, installed = router.decisions(60.0)
    assert overdue == Changed(
        z, "z", A, InstanceState.SUSPECTED, "it has not acknowledged its version for 50 s"
    )
    assert installed == Installed(A, Version(1))
    router.loaded(z, Version(1), 70.0)
    (back,) = router.decisions(70.0)
    assert isinstance(back, Changed) and back.state is InstanceState.SERVING


def test_one_late_answer_evicts_nothing() -> None:
    router = serving({"x": 2, "y": 2})
    router.requested(1, asked(1), 0.0)
    assert routes(router) == {1: "x"}
    (number,) = router.numbers_of("x")
    assert number is not None
    router.suspected(number, "silent", 1.0)
    changed, probe = router.decisions(1.0)
    assert isinstance(changed, Changed) and changed.state is InstanceState.SUSPECTED
    assert probe == Probe(number)
    router.requested(1, asked(2), 1.0)
    router.requested(1, asked(3), 1.0)
    assert routes(router, 1.0) == {2: "y", 3: "y"}
    router.trusted(number, Version(0), 2.0)
    (back,) = router.decisions(2.0)
    assert isinstance(back, Changed) and back.state is InstanceState.SERVING, "it need not load again"
    router.requested(1, asked(4), 2.0)
    router.requested(1, asked(5), 2.0)
    assert routes(router, 2.0) == {4: "x"}, "it still has its first turn"


def test_one_that_is_started_again_loads_before_it_serves() -> None:
    router = serving({"x": 1})
    router.requested(1, asked(1), 0.0)
    assert routes(router) == {1: "x"}
    (again,) = router.joined("x", (A,), 1, 5.0)
    gone, load = router.decisions(5.0)
    assert isinstance(gone, Changed) and gone.state is InstanceState.GONE
    assert load == Load(again, A, Version(0))
    router.ended(1, 1, 0, 6.0)
    router.requested(1, asked(2), 6.0)
    assert router.decisions(6.0) == []
    router.loaded(again, Version(0), 7.0)
    changed, route = router.decisions(7.0)
    assert isinstance(changed, Changed) and changed.reason == "it was started again"
    assert isinstance(route, Route) and route.routed.instance == again


def test_a_policy_without_instances_is_deserted_after_a_while() -> None:
    router = serving({"x": 1})
    (number,) = router.numbers_of("x")
    assert number is not None
    router.lost(number, "out of memory", 10.0)
    router.decisions(10.0)
    assert router.due_s == 90.0 and router.decisions(89.0) == []
    assert router.decisions(90.0) == [NoInstances(A, 80.0, "x: out of memory")]
    assert router.due_s == math.inf


def test_a_policy_whose_last_instance_can_not_load_is_deserted_at_once() -> None:
    router = serving({"x": 1, "y": 1})
    router.published(A, Version(1), 0.0)
    first, second = sorted(d.instance for d in router.decisions(0.0) if isinstance(d, Load))
    router.failed(first, "LoadFailed", 1.0)
    assert not any(isinstance(d, NoInstances) for d in router.decisions(1.0))
    router.failed(second, "LoadFailed: digest", 1.0)
    assert NoInstances(A, 0.0, "y: LoadFailed: digest") in router.decisions(1.0)


def test_one_that_leaves_ends_its_turns_first() -> None:
    router = serving({"x": 2, "y": 2})
    router.requested(1, asked(1), 0.0)
    assert routes(router) == {1: "x"}
    (number,) = router.numbers_of("x")
    assert number is not None
    router.drain(number, 1.0)
    for turn in range(2, 5):
        router.requested(1, asked(turn), 1.0)
    assert routes(router, 1.0) == {2: "y", 3: "y"}
    router.ended(1, 1, 5, 2.0)
    (gone,) = router.decisions(2.0)
    assert isinstance(gone, Changed) and (gone.state, gone.reason) == (InstanceState.GONE, "it has left")
    assert router.numbers_of("x") == []


def test_one_that_moves_serves_the_other_policy() -> None:
    router = serving({"x": 2, "y": 2})
    router.published(B, Version(7), 0.0)
    router.requested(1, asked(1), 0.0)
    router.requested(1, asked(9, B, 7, 7), 0.0)
    assert routes(router) == {1: "x"}
    (number,) = router.numbers_of("x")
    assert number is not None
    router.drain(number, 1.0, moves_to=B)
    router.ended(1, 1, 5, 2.0)
    assert router.decisions(2.0)[-1] == Load(number, B, Version(7))
    router.loaded(number, Version(7), 3.0)
    changed, route, installed = router.decisions(3.0)
    assert isinstance(changed, Changed) and changed.reason == "it has moved from a"
    assert isinstance(route, Route) and (route.routed.turn, route.routed.version) == (9, 7)
    assert installed == Installed(B, Version(7))
    for turn in range(10, 13):
        router.requested(1, asked(turn), 4.0)
    assert routes(router, 4.0) == {10: "y", 11: "y"}


FIRST = {A: 100, B: 101}


def two_policies(**settings: Any) -> Router:
    """Two instances of each policy, whose turns take 4 s and loads 1 s; policy A has 40 turns, and B one."""
    balancing = RebalanceSettings(
        BalanceConfig(scope="intra+inter"),
        **({"capacities": {A: 2}, "interruptible": (A, B)} | settings),
    )
    router = Router([A, B], CONFIG, balancing)
    for policy in (A, B):
        numbers = [router.joined(f"{policy}{n}", (policy,), 3, 0.0)[0] for n in range(2)]
        router.published(policy, Version(0), 0.0)
        for number in numbers:
            router.loaded(number, Version(0), 1.0)
        router.requested(1, asked(FIRST[policy], policy), 1.0)
    router.decisions(1.0)
    for policy in (A, B):
        router.ended(1, FIRST[policy], 40, 5.0)
    for turn in range(40):
        router.requested(1, asked(turn), 5.0)
    router.requested(1, asked(50, B), 5.0)
    router.decisions(5.0)
    return router


def test_the_instance_with_the_fewest_tokens_moves_to_the_policy_whose_turns_wait() -> None:
    router = two_policies()
    router.balance(6.0)
    moved, load = router.decisions(6.0)
    assert isinstance(moved, Moved) and (moved.name, moved.giver, moved.taker) == ("b1", B, A)
    assert "a has 20.0 turns per instance, b 0.5" in moved.reason
    assert load == Load(moved.instance, A, Version(0))
    router.balance(6.5)
    assert router.decisions(6.5) == [], "B keeps one instance"
    router.loaded(moved.instance, Version(0), 7.0)
    changed, *routed = router.decisions(7.0)
    assert isinstance(changed, Changed) and changed.reason == "it has moved from b"
    assert [d.routed.instance for d in routed if isinstance(d, Route)] == [moved.instance] * 2, (
        "its capacity is A's now"
    )
    assert router.statistics()["moves"] == 1.0


def test_turns_of_an_instance_that_moves_are_resumed_elsewhere_if_its_engine_can() -> None:
    for interruptible in (True, False):
        router = two_policies(interruptible=(B,) if interruptible else ())
        router.requested(1, asked(51, B), 5.0)
        assert routes(router, 5.0) == {51: "b1"}
        router.balance(6.0)
        moved, *loads = router.decisions(6.0)
        assert isinstance(moved, Moved) and moved.name == "b0"
        assert bool(loads) == interruptible
        router.ended(1, 50, 7, 9.0)
        assert [type(d) for d in router.decisions(9.0)] == ([] if interruptible else [Load])
        router.requested(1, asked(52, B), 9.0)
        assert routes(router, 9.0) == {52: "b1"}


def test_moves_wait_while_a_policy_installs_a_version() -> None:
    for policy in (A, B):
        router = two_policies()
        router.published(policy, Version(1), 6.0)
        loads = [d.instance for d in router.decisions(6.0) if isinstance(d, Load)]
        router.balance(7.0)
        assert router.decisions(7.0) == []
        for number in loads:
            router.loaded(number, Version(1), 8.0)
        for turn in range(200, 240):
            router.requested(1, asked(turn, newest=None), 8.0)
        router.decisions(8.0)
        router.balance(8.0)
        assert [type(d) for d in router.decisions(8.0)] == [Moved, Load]


def test_turns_that_wait_for_a_later_version_move_nothing() -> None:
    router = two_policies()
    for turn in range(40):
        router.ended(1, turn, 0, 5.0)
        router.requested(1, asked(200 + turn, oldest=1, newest=1), 5.0)
    router.balance(6.0)
    assert router.decisions(6.0) == []


def test_an_instance_that_has_moved_stays_for_a_while() -> None:
    router = two_policies()
    router.balance(6.0)
    moved = router.decisions(6.0)[0]
    assert isinstance(moved, Moved)
    router.loaded(moved.instance, Version(0), 9.0)
    router.decisions(9.0)
    assert moved.name == "b1"
    for turn in range(6, 40):  # the first six are at the other two instances
        router.ended(1, turn, 0, 9.0)
    for turn in range(40):
        router.requested(1, asked(200 + turn, B), 9.0)
    router.balance(14.0)
    moves = [d.name for d in router.decisions(14.0) if isinstance(d, Moved)]
    assert moves == ["a0", "a1"], "it took 3 s, so it stays for 6 s, although it has nothing to do"


def deserted_policy() -> Router:
    """A policy B without an instance: a0 had moved to it, was lost, and is started again as one of A, which has a1."""
    router = Router([A, B], CONFIG, RebalanceSettings(BalanceConfig(scope="intra+inter"), {}, (A, B)))
    a0, a1 = (router.joined(name, (A,), 3, 0.0)[0] for name in ("a0", "a1"))
    for policy in (A, B):
        router.published(policy, Version(0), 0.0)
    for number in (a0, a1):
        router.loaded(number, Version(0), 1.0)
    router.decisions(1.0)
    router.drain(a0, 2.0, moves_to=B)
    router.loaded(a0, Version(0), 3.0)
    router.decisions(3.0)
    router.lost(a0, "its host is lost", 4.0)
    return router


def test_a_policy_without_an_instance_gets_one_although_no_turn_waits_for_it() -> None:
    router = deserted_policy()
    router.balance(5.0)
    assert not any(isinstance(d, Moved) for d in router.decisions(5.0)), "A keeps its only one"
    (again,) = router.joined("a0", (A,), 3, 6.0)
    router.decisions(6.0)
    router.loaded(again, Version(0), 7.0)
    router.decisions(7.0)
    router.balance(7.0)
    moved, load = router.decisions(7.0)
    assert isinstance(moved, Moved) and (moved.giver, moved.taker) == (A, B)
    assert "b has no instance" in moved.reason and load == Load(moved.instance, B, Version(0))
    assert router.due_s == 57.0, "the load's time, and no end of the run"
    router.balance(8.0)
    assert router.decisions(8.0) == []


def test_a_version_that_is_published_meanwhile_is_installed_by_the_instance_that_comes() -> None:
    router = deserted_policy()
    (again,) = router.joined("a0", (A,), 3, 6.0)
    router.published(B, Version(1), 6.0)
    router.loaded(again, Version(0), 7.0)
    router.decisions(7.0)
    router.balance(7.0)
    moved, load = router.decisions(7.0)
    assert isinstance(moved, Moved) and load == Load(moved.instance, B, Version(1))
    router.loaded(moved.instance, Version(1), 8.0)
    assert Installed(B, Version(1)) in router.decisions(8.0)


def test_turns_are_dealt_in_turn_if_balancing_is_off() -> None:
    router = Router([A], CONFIG, RebalanceSettings(BalanceConfig(scope="off")))
    numbers = [router.joined(name, (A,), 8, 0.0)[0] for name in "xyz"]
    router.published(A, Version(0), 0.0)
    for number in numbers:
        router.loaded(number, Version(0), 0.0)
    for turn in range(6):
        router.requested(1, asked(turn, prompt_tokens=1000 if turn == 0 else 1, prefix="same"), 0.0)
    assert list(routes(router).values()) == ["x", "y", "z"] * 2


def test_a_session_that_ends_frees_its_turns() -> None:
    router = serving({"x": 2})
    for turn in range(4):
        router.requested(1, asked(turn), 0.0)
    router.requested(2, asked(0), 0.0)
    assert routes(router) == {0: "x", 1: "x"}
    router.session_ended(1, 1.0)
    (route,) = router.decisions(1.0)
    assert isinstance(route, Route) and (route.session, route.routed.turn) == (2, 0)


def test_every_state_can_be_left_for_good() -> None:
    for state in InstanceState:
        assert (TRANSITIONS[state] == {}) == (state is InstanceState.GONE)
        if state is not InstanceState.GONE:
            assert TRANSITIONS[state][InstanceEvent.LEAVE] is InstanceState.GONE


@pytest.mark.parametrize("capacity", [1, 64])
def test_a_thousand_instances_share_ten_thousand_turns(capacity: int) -> None:
    router = serving({f"i{n}": capacity for n in range(1000)})
    for turn in range(10_000):
        router.requested(1, asked(turn), 0.0)
    counts: dict[str, int] = {}
    for instance in routes(router).values():
        counts[instance] = counts.get(instance, 0) + 1
    assert set(counts.values()) == {min(10, capacity)} and len(counts) == 1000
