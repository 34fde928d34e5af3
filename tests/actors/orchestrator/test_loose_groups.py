"""Groups that no step waits for: whose they are, and how they end."""

from flexmarl.actors.messages import KEPT_STEPS, GroupWaiting
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.loose_groups import LooseGroups, is_forgotten_soon

A = PolicyName("a")


def waiting(step: int, query: str) -> GroupWaiting:
    return GroupWaiting(Step(step), query, {A: Version(step)}, 4, 0)


def test_a_group_belongs_to_its_step_until_it_waits_and_then_to_the_one_that_takes_it() -> None:
    groups = LooseGroups()
    key = Step(1), "q"
    assert groups.step_of(key) == 1 and key not in groups
    assert groups.wait("worker", waiting(1, "q")) == 1
    assert key in groups and [*groups.waiting()] == [(key, "worker", {A: 1})]
    assert groups.wait("another", waiting(1, "q")) is None, "it was loose before"
    groups.admit(key, Step(3))
    assert groups.step_of(key) == 3 and key not in groups and groups.open_of(Step(1)) == ["q"]
    assert groups.wait("another", waiting(1, "q")) == 3, "it has begun again with a lost worker"
    groups.admit(key, Step(4))
    assert groups.complete(Step(3)) == set()
    assert groups.complete(Step(4)) == {1} and groups.open_of(Step(1)) == []


def test_a_lost_workers_group_begins_again_unless_it_has_been_answered() -> None:
    groups = LooseGroups()
    asked, answered = (Step(2), "asked"), (Step(2), "answered")
    groups.begin(asked)
    groups.begin(answered)
    assert not [*groups.waiting()], "both are generated"
    groups.wait("worker", waiting(2, "answered"))
    assert groups.lost(asked, "late") is None and groups.lost((Step(2), "of a step"), "late") is None
    end = groups.lost(answered, "late: lost")
    assert end is not None and (end.step, end.query, end.dropped) == (2, "answered", "late: lost")
    assert end.figures == {"late_trajectories": 4} and not end.samples
    groups.end(answered)
    assert [(end.query, end.figures["late_trajectories"]) for end in groups.ends("late")] == [("asked", 0)]


def test_a_group_is_given_up_once() -> None:
    groups = LooseGroups()
    groups.wait("worker", waiting(1, "q"))
    groups.give_up((Step(1), "q"))
    assert not [*groups.waiting()] and (Step(1), "q") in groups and len(groups) == 1


def test_a_group_is_too_old_before_the_store_forgets_its_step() -> None:
    assert not is_forgotten_soon((Step(1), "q"), Step(1 + KEPT_STEPS))
    assert is_forgotten_soon((Step(1), "q"), Step(2 + KEPT_STEPS))
