"""The waits of the router, for people."""

import math

from flexmarl.actors.inference.router.router_decisions import Installed, NoInstances
from flexmarl.actors.names import Version
from flexmarl.core.waits import Wait

from .router_events import A, asked, serving


class TestWaits:
    """Waits for people: of turns, and of instances."""

    def test_nobody_waits_at_a_router_with_room(self) -> None:
        router = serving({"x": 2})
        assert router.waits(9.0) == []
        router.requested(1, asked(1), 9.0)
        router.decisions(9.0)
        assert router.waits(10.0) == [], "it is at its instance, which names it"

    def test_an_instance_that_loads_is_named_with_its_limit(self) -> None:
        router = serving({"x": 1, "y": 1})
        router.published(A, Version(1), 10.0)
        router.decisions(10.0)
        router.loaded(router.numbers_of("y")[0], Version(1), 14.0)
        (wait,) = router.waits(17.0)
        assert wait == Wait("x, which loads version 1 of a", 7.0, "router.load_timeout_s=50 ends it", "x")

    def test_a_load_that_waits_for_others_is_named_and_has_its_time_afterwards(self) -> None:
        router = serving({"x": 1})
        router.published(A, Version(1), 10.0)
        (x,) = router.numbers_of("x")
        router.load_held(x)
        assert router.waits(70.0) == [], "nothing is before it any more: it is about to begin"
        assert router.waits(70.0, lambda policy: ["y", "z"] if policy == A else []) == [
            Wait(
                "y, z with weights that turns wait for, before x loads those of a",
                60.0,
                "router.load_timeout_s=50 ends it",
                "y",
            )
        ]
        assert router.due_s == math.inf
        router.load_begun(x, 70.0)
        assert router.due_s == 70.0 + 50.0, "the limit of a load"
        router.decisions(119.0)
        router.loaded(x, Version(1), 119.0)
        assert router.decisions(119.0)[-1] == Installed(A, Version(1))

    def test_turns_that_wait_for_room_are_the_instances_consequence(self) -> None:
        router = serving({"x": 1})
        for turn in range(3):
            router.requested(1, asked(turn), 0.0)
        router.decisions(0.0)
        (wait,) = router.waits(5.0)
        assert (wait.text, wait.actor) == ("room at the instances of a for 2 turns", "a")

    def test_turns_that_wait_for_a_newer_version_are_the_trainers_consequence(self) -> None:
        router = serving({"x": 4})
        router.requested(1, asked(1, oldest=1, newest=1), 0.0)
        router.decisions(0.0)
        (wait,) = router.waits(5.0)
        assert (wait.text, wait.actor) == ("a newer version of a for 1 turn", "trainer")

    def test_a_policy_without_an_instance_is_a_cause_until_the_run_ends_for_it(self) -> None:
        router = serving({"x": 1})
        router.lost(router.numbers_of("x")[0], "killed", 20.0)
        router.requested(1, asked(1), 21.0)
        router.decisions(21.0)
        (wait,) = router.waits(30.0)
        assert wait == Wait(
            "an instance of a for 1 turn: x: killed", 10.0, "router.return_timeout_s=80 ends the run"
        )
        assert any(isinstance(decision, NoInstances) for decision in router.decisions(101.0))
        assert router.waits(102.0) == []
