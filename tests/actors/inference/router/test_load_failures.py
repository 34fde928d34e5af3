"""Loads that end without a version, as the router decides about them."""

from flexmarl.actors.inference.router.instance_states import InstanceState
from flexmarl.actors.inference.router.rebalancer import BalanceConfig
from flexmarl.actors.inference.router.router import Router
from flexmarl.actors.inference.router.router_decisions import (
    Changed,
    Decision,
    Installed,
    Load,
    Moved,
    NoInstances,
    Probe,
)
from flexmarl.actors.inference.router.router_loads import RebalanceSettings
from flexmarl.actors.names import Version

from .router_events import CONFIG, A, B, asked, routes, serving


def states(decided: list[Decision]) -> list[tuple[str, InstanceState]]:
    return [(d.instance, d.state) for d in decided if isinstance(d, Changed)]


class TestLateLoad:
    def test_one_that_is_late_is_probed_when_its_load_has_ended(self) -> None:
        router = serving({"x": 1, "y": 1})
        x, y = (router.numbers_of(name)[0] for name in "xy")
        router.published(A, Version(1), 0.0)
        router.loaded(y, Version(1), 1.0)
        router.decisions(1.0)
        late = router.decisions(50.0)
        assert states(late) == [("x", InstanceState.SUSPECTED)]
        assert Probe(x) not in late, "it would have no version, and begin again"
        router.suspected(x, "silent", 60.0)
        assert router.decisions(60.0) == [Probe(x)], "it would be forgotten for the rest of the run"
        router.suspected(x, "silent", 61.0)
        assert router.decisions(61.0) == [], "it is being probed"
        router.trusted(x, None, 62.0)
        assert router.decisions(62.0) == [Load(x, A, Version(1))]


class TestReadFailure:
    def test_it_tries_ever_more_seldom_until_a_policy_must_have_an_instance(self) -> None:
        router = serving({"x": 1, "y": 1})
        x, y = (router.numbers_of(name)[0] for name in "xy")
        router.published(A, Version(1), 0.0)
        router.loaded(y, Version(1), 0.0)
        router.decisions(0.0)
        now, pauses = 0.0, list[float]()
        while True:
            router.read_failed(x, "the link is cut", now)
            decided = router.decisions(now)
            if not any(isinstance(d, Probe) for d in decided):
                break
            pauses += [d.pause_s for d in decided if isinstance(d, Probe)]
            now += pauses[-1]
            router.trusted(x, None, now)
            assert router.decisions(now) == [Load(x, A, Version(1))]
        assert pauses == [1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0] and now == 128.0
        assert states(decided) == [("x", InstanceState.GONE)]

    def test_a_version_that_newer_ones_have_replaced_costs_no_instance(self) -> None:
        router = serving({"x": 1, "y": 1})
        x, y = (router.numbers_of(name)[0] for name in "xy")
        router.published(A, Version(1), 0.0)
        router.suspected(x, "silent", 0.0)
        for version in (1, 2, 3):
            router.published(A, Version(version), float(version))
            router.loaded(y, Version(version), float(version))
            router.decisions(float(version))
        router.read_failed(x, "StaleHandle: needs version 1, found version 3", 3.5)
        router.trusted(x, None, 4.0)
        assert router.decisions(4.0)[-1] == Load(x, A, Version(3))
        router.loaded(x, Version(3), 5.0)
        assert states(router.decisions(5.0)) == [("x", InstanceState.SERVING)]

    def test_it_is_that_of_one_policy_and_interrupts_no_other(self) -> None:
        router = Router([A, B], CONFIG)
        first, second = router.joined("x", (A, B), 9, 0.0)
        for policy, number in ((A, first), (B, second)):
            router.published(policy, Version(0), 0.0)
            router.loaded(number, Version(0), 0.0)
        router.published(A, Version(1), 1.0)
        router.decisions(1.0)
        router.read_failed(first, "the link is cut", 2.0)
        assert states(router.decisions(2.0)) == [("x", InstanceState.SUSPECTED)]
        router.requested(1, asked(1, B), 2.0)
        assert routes(router, 2.0) == {1: "x"}


class TestFailureAfterAMove:
    def moved(self) -> tuple[Router, int]:
        """x and y serve A; B has lost its only instance, so that x moves to it."""
        router = Router([A, B], CONFIG, RebalanceSettings(BalanceConfig(scope="intra+inter"), {}, (A, B)))
        numbers = [
            router.joined(name, (policy,), 3, 0.0)[0] for name, policy in (("x", A), ("y", A), ("b", B))
        ]
        for policy in (A, B):
            router.published(policy, Version(0), 0.0)
        for number in numbers:
            router.loaded(number, Version(0), 1.0)
        router.lost(numbers[-1], "killed", 2.0)
        router.decisions(2.0)
        router.balance(3.0)
        moved = router.decisions(3.0)[0]
        assert isinstance(moved, Moved) and (moved.name, moved.taker) == ("x", B)
        return router, moved.instance

    def test_it_goes_back_and_no_other_follows(self) -> None:
        router, x = self.moved()
        router.failed(x, "LoadFailed: no memory", 4.0)
        drained, load = router.decisions(4.0)
        assert drained == Changed(x, "x", B, InstanceState.DRAINING, "LoadFailed: no memory")
        assert load == Load(x, A, Version(0))
        router.loaded(x, Version(0), 5.0)
        assert states(router.decisions(5.0)) == [("x", InstanceState.SERVING)]
        router.requested(1, asked(1, B), 6.0)
        router.balance(30.0)
        assert router.decisions(30.0) == [], "y would come back too"
        assert router.decisions(84.0) == [NoInstances(B, 80.0, "x: LoadFailed: no memory")]

    def test_the_policys_own_instance_returns_meanwhile(self) -> None:
        router, x = self.moved()
        router.published(B, Version(1), 3.5)
        router.failed(x, "LoadFailed: no memory", 4.0)
        (again,) = router.joined("b", (B,), 3, 40.0)
        router.loaded(again, Version(1), 41.0)
        assert Installed(B, Version(1)) in router.decisions(41.0)

    def test_one_that_can_not_load_its_former_policy_either_is_gone(self) -> None:
        router, x = self.moved()
        router.failed(x, "LoadFailed: no memory", 4.0)
        router.decisions(4.0)
        router.failed(x, "LoadFailed: no memory", 5.0)
        assert states(router.decisions(5.0)) == [("x", InstanceState.GONE)]

    def test_one_that_has_served_the_policy_stays_there(self) -> None:
        router, x = self.moved()
        router.suspected(x, "silent", 4.0)
        router.trusted(x, Version(0), 5.0)
        router.published(B, Version(1), 6.0)
        router.decisions(6.0)
        router.failed(x, "LoadFailed: digest", 7.0)
        assert NoInstances(B, 0.0, "x: LoadFailed: digest") in router.decisions(7.0)
