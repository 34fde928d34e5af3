"""A query's group under every order in which its trajectories end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.errors import ProtocolViolation
from flexmarl.actors.rollout.groups.group import (
    Abort,
    Close,
    Decision,
    Drop,
    Group,
    GroupRules,
    Start,
)


@st.composite
def rules(draw: st.DrawFn) -> GroupRules:
    size = draw(st.integers(2, 6))
    return GroupRules(
        size,
        draw(st.integers(0, 4)),
        draw(st.sampled_from(["abort", "keep"])),
        draw(st.integers(1, size)),
        draw(st.integers(0, 3)),
    )


@settings(max_examples=250)
@given(rules=rules(), data=st.data())
def test_a_group_is_settled_once_whatever_happens(rules: GroupRules, data: st.DataObject) -> None:
    group = Group(rules)
    running: set[int] = set()
    verdicts: list[Close | Drop] = []
    succeeded: list[int] = []
    started: list[int] = []

    def take(decisions: list[Decision]) -> None:
        for decision in decisions:
            assert not verdicts, "decided after the verdict"
            match decision:
                case Start(number):
                    started.append(number)
                    running.add(number)
                case Abort(number):
                    running.remove(number)
                case Close() | Drop():
                    verdicts.append(decision)

    take(group.start())
    while running:
        number = data.draw(st.sampled_from(sorted(running)))
        running.remove(number)
        settled = group.settled
        match data.draw(st.sampled_from(["succeed", "fail", "straggle"])):
            case "succeed":
                succeeded += [] if settled else [number]
                take(group.succeeded(number))
            case "fail":
                take(group.failed(number))
            case "straggle":
                take(group.failed(number, replacement=True))
    assert started == [*range(len(started))]
    assert rules.size + rules.extra <= len(started) <= rules.size + rules.extra + rules.max_replacements
    assert group.replacements == len(started) - rules.size - rules.extra
    (verdict,) = verdicts
    if isinstance(verdict, Close):
        assert verdict.trajectories == tuple(sorted(succeeded))
        assert rules.minimum <= len(succeeded) <= rules.size
        assert len(succeeded) == rules.size or group.oversampled == 0
    else:
        assert len(succeeded) < rules.minimum


def started(rules: GroupRules) -> Group:
    group = Group(rules)
    group.start()
    return group


def test_the_first_to_succeed_are_the_group_and_the_rest_is_stopped() -> None:
    group = started(GroupRules(size=2, extra=2))
    assert group.succeeded(3) == [] and group.failed(0) == []
    assert group.succeeded(1) == [Abort(2), Close((1, 3))]
    assert group.oversampled == 1


def test_a_surplus_that_is_kept_ends_in_silence() -> None:
    group = started(GroupRules(size=2, extra=2, oversampled="keep"))
    group.succeeded(0)
    assert group.succeeded(1) == [Close((0, 1))]
    assert group.succeeded(2) == [] and group.failed(3, replacement=True) == []


def test_a_straggler_is_replaced_as_often_as_the_rules_allow() -> None:
    group = started(GroupRules(size=2, max_replacements=1))
    assert group.failed(0, replacement=True) == [Start(2)]
    assert group.failed(2, replacement=True) == []
    assert group.succeeded(1) == [Close((1,))]


def test_a_group_that_cannot_reach_its_minimum_is_given_up_at_once() -> None:
    group = started(GroupRules(size=3, minimum=3))
    (abort_1, abort_2, drop) = group.failed(0)
    assert (abort_1, abort_2) == (Abort(1), Abort(2))
    assert isinstance(drop, Drop) and "rollout.min_trajectories=3" in drop.reason


def test_a_trajectory_ends_once() -> None:
    group = started(GroupRules(size=2))
    group.succeeded(0)
    with pytest.raises(ProtocolViolation, match="trajectory 0 ended, which was not running"):
        group.failed(0)
