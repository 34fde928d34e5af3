"""Links between rollout workers and instances that are cut, as the router decides about them."""

from flexmarl.actors.inference.router.router import Router
from flexmarl.actors.inference.router.router_decisions import NoInstances, Probe, Route
from flexmarl.actors.names import Version
from flexmarl.core.waits import Wait

from .router_events import CONFIG, A, B, asked, routes, serving


def lose(router: Router, turn: int, now: float, session: int = 1) -> str:
    """A turn is asked for, routed and lost; the instance that it was at. The instance answers if it is probed."""
    router.requested(session, asked(turn), now)
    (at,) = routes(router, now).values()
    router.ended(session, turn, 0, now, lost=True)
    for decision in router.decisions(now):
        if isinstance(decision, Probe):
            router.trusted(decision.instance, Version(0), now)
    router.decisions(now)
    return at


def test_a_turn_that_was_lost_at_one_that_answers_is_begun_again_there() -> None:
    router = serving({"x": 2})
    assert [lose(router, turn, 1.0) for turn in (1, 2)] == ["x", "x"]


def test_a_cut_link_costs_its_worker_the_instance_and_no_other_worker() -> None:
    router = serving({"x": 2, "y": 4})
    router.requested(2, asked(100, prompt_tokens=900), 0.0)
    assert routes(router) == {100: "x"}
    router.requested(2, asked(101, prompt_tokens=1000), 0.0)
    assert routes(router) == {101: "y"}
    assert [lose(router, turn, 1.0) for turn in (1, 2)] == ["x", "x"]
    router.requested(2, asked(102), 1.0)
    router.requested(1, asked(3), 1.0)
    assert routes(router, 1.0) == {102: "x", 3: "y"}
    assert router.waits(1.0) == []


def test_a_cut_link_is_tried_by_one_turn_at_a_time_and_ever_more_seldom() -> None:
    router = serving({"x": 9})
    assert [lose(router, turn, 1.0) for turn in (1, 2)] == ["x", "x"]
    for turn in (3, 4, 5):
        router.requested(1, asked(turn), 1.0)
    assert routes(router, 1.9) == {} and router.due_s == 2.0
    assert routes(router, 2.0) == {3: "x"}
    assert routes(router, 50.0) == {}, "the trial is under way"
    router.ended(1, 3, 0, 50.0, lost=True)
    assert routes(router, 50.0) == {} and router.due_s == 52.0
    assert routes(router, 52.0) == {4: "x"}
    router.ended(1, 4, 7, 53.0)
    router.requested(1, asked(6), 53.0)
    assert routes(router, 53.0) == {5: "x", 6: "x"}, "it has healed"
    assert lose(router, 7, 60.0) == "x" and lose(router, 8, 60.0) == "x", "it is a first loss again"


def test_a_turn_that_was_given_up_says_nothing_about_the_link() -> None:
    router = serving({"x": 9})
    assert [lose(router, turn, 1.0) for turn in (1, 2)] == ["x", "x"]
    router.requested(1, asked(3), 2.0)
    router.requested(1, asked(4), 2.0)
    assert routes(router, 2.0) == {3: "x"}
    router.ended(1, 3, 0, 3.0)
    assert routes(router, 3.0) == {4: "x"}


def test_a_worker_that_reaches_no_instance_is_named_with_the_link_and_ends_the_run_after_a_while() -> None:
    router = serving({"x": 9, "y": 9})
    router.session_begun(1, "rollout-1")
    assert [lose(router, turn, 1.0) for turn in (1, 2, 3, 4)] == ["x", "x", "y", "y"]
    router.requested(1, asked(5), 1.0)
    reason = "rollout-1 can't reach x, y, which answer the router: the link between their hosts is cut"
    assert Wait(
        f"an instance of a for 1 turn: {reason}", 0.5, "router.return_timeout_s=80 ends the run"
    ) in router.waits(1.5)
    now, ends = 1.0, list[NoInstances]()
    while not ends:
        now = router.due_s
        while decided := router.decisions(now):
            for decision in decided:
                if isinstance(decision, Route):
                    turn = decision.routed.turn
                    router.ended(1, turn, 0, now, lost=True)
                    router.requested(1, asked(turn + 1), now)
            ends += [decision for decision in decided if isinstance(decision, NoInstances)]
    assert ends[0] == NoInstances(A, 80.0, reason) and 81.0 <= now <= 1.0 + 2 * 80.0


def test_a_trial_whose_policy_leaves_the_instance_leaves_the_link_to_the_next_turn() -> None:
    router = Router([A, B], CONFIG)
    first, second = router.joined("x", (A, B), 9, 0.0)
    for policy, number in ((A, first), (B, second)):
        router.published(policy, Version(0), 0.0)
        router.loaded(number, Version(0), 0.0)
    router.decisions(0.0)
    for turn in (1, 2):
        router.requested(1, asked(turn), 1.0)
        assert routes(router, 1.0) == {turn: "x"}
        router.ended(1, turn, 0, 1.0, lost=True)
        for number in [d.instance for d in router.decisions(1.0) if isinstance(d, Probe)]:
            router.trusted(number, Version(0), 1.0)
    router.requested(1, asked(3), 1.0)
    router.requested(1, asked(4, B), 1.0)
    assert routes(router, 2.0) == {3: "x"}, "it tries the link"
    router.failed(first, "LoadFailed: digest", 3.0)
    assert routes(router, 3.0) == {4: "x"}


def test_links_of_a_session_and_of_an_instance_are_forgotten_with_them() -> None:
    router = serving({"x": 9})
    assert [lose(router, turn, 1.0) for turn in (1, 2)] == ["x", "x"]
    router.requested(2, asked(3), 1.0)
    assert routes(router, 1.0) == {3: "x"}
    router.session_ended(1, 1.0)
    router.requested(1, asked(4), 1.0)
    assert routes(router, 1.0) == {4: "x"}
    router.ended(1, 4, 5, 1.0)
    assert [lose(router, turn, 2.0) for turn in (5, 6)] == ["x", "x"]
    (number,) = router.joined("x", (A,), 9, 2.0)
    router.decisions(2.0)
    router.loaded(number, Version(0), 2.0)
    router.requested(1, asked(7), 2.0)
    assert routes(router, 2.0) == {7: "x"}
