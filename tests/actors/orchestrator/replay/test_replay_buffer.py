"""The groups that come again: their choice by hand, and that no bound is passed and a resumed run repeats it."""

import copy
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from flexmarl.actors.messages import LoggedGroup, LoggedTrajectory, LoggedTurn, Query
from flexmarl.actors.names import AgentName, PolicyName, Version
from flexmarl.actors.orchestrator.replay.recent_replay import RecentReplayConfig
from flexmarl.actors.orchestrator.replay.replay_buffer import ReplayBuffer, ReplayState
from flexmarl.actors.orchestrator.replay.replay_options import ReplayOptions
from flexmarl.actors.orchestrator.replay.success_replay import SuccessReplayConfig, success_share

SOLVER, MODEL = AgentName("solver"), PolicyName("model")


def group(name: str, version: int, *rewards: float) -> LoggedGroup:
    turn = LoggedTurn(SOLVER, [], "a", (1, 2), (3,), (-0.5,), 1.0, Version(version))
    return LoggedGroup(Query(name, ""), [LoggedTrajectory([turn], {SOLVER: reward}) for reward in rewards])


def buffer(options: ReplayOptions, staleness: int = 4) -> ReplayBuffer:
    return ReplayBuffer(options, staleness, {SOLVER: MODEL})


def taken(of: ReplayBuffer, version: int, queries: int = 4) -> list[str]:
    return [each.query.id for each in of.take({MODEL: Version(version)}, queries)]


def test_the_newest_groups_whose_rewards_differ_come_again_once() -> None:
    replay = buffer(RecentReplayConfig(share=0.5))
    for name, version, *rewards in (("a", 1, 0, 1), ("b", 2, 1, 1), ("c", 2, 0, 1), ("d", 2, 1, 0)):
        replay.closed(group(name, version, *rewards))
    assert taken(replay, 3) == ["d~1", "c~2"], "b has no advantage"
    assert taken(replay, 3) == ["a~3"]
    assert taken(replay, 3) == []


def test_the_rarest_successes_come_first_and_common_ones_never() -> None:
    replay = buffer(SuccessReplayConfig(share=0.25, most=0.5))
    replay.closed(group("often", 5, 1, 1, 1, 0))
    replay.closed(group("half", 5, 1, 1, 0, 0))
    replay.closed(group("rare", 3, 0, 0, 0, 1))
    assert [taken(replay, 5) for _ in range(3)] == [["rare~1"], ["half~2"], []]
    assert success_share({SOLVER: [0, 0.5, 0.5, 0], AgentName("judge"): [1.0, 0, 0, 0]}) == 0.375


def test_a_group_that_is_too_old_never_comes_again() -> None:
    replay = buffer(RecentReplayConfig(share=1.0, max_staleness=2))
    replay.closed(group("a", 1, 0, 1))
    replay.closed(group("b", 2, 0, 1))
    assert taken(replay, 4) == ["b~1"] and replay.state.groups == []
    assert taken(buffer(RecentReplayConfig()), 4) == []


def test_beyond_the_limit_the_one_that_is_worth_least_makes_room() -> None:
    replay = buffer(SuccessReplayConfig(limit=2, share=1.0))
    for name, rewards in (("half", (1, 0)), ("rare", (1, 0, 0, 0)), ("third", (1, 0, 0))):
        replay.closed(group(name, 1, *rewards))
    assert taken(replay, 1) == ["rare~1", "third~2"]


@pytest.mark.parametrize(
    "options", [RecentReplayConfig(share=0.3), SuccessReplayConfig(share=0.3, times=2, limit=3)]
)
@settings(max_examples=60)
@given(
    calls=st.lists(
        st.one_of(
            st.none(), st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=4))
        ),
        max_size=40,
    ),
    resumes=st.integers(0, 40),
)
def test_bounds_hold_and_a_resumed_run_repeats_the_choice(
    options: ReplayOptions, calls: list[tuple[int, list[int]] | None], resumes: int
) -> None:
    """None: a step begins, with a new version. The state goes through a checkpoint's form before call ``resumes``."""
    whole, resumed = buffer(options), buffer(options)
    version, steps, uses = 3, 0, dict[str, int]()
    for number, call in enumerate(calls):
        if number == resumes:
            state = TypeAdapter(ReplayState).validate_python(copy.deepcopy(asdict(resumed.state)))
            resumed = ReplayBuffer(options, 4, {SOLVER: MODEL}, state)
        if call is not None:
            age, rewards = call
            for each in (whole, resumed):
                each.closed(group(f"q{number}", version - age, *rewards))
            continue
        version, steps = version + 1, steps + 1
        groups = whole.take({MODEL: Version(version)}, 2)
        assert groups == resumed.take({MODEL: Version(version)}, 2)
        for one in groups:
            assert (
                version - one.oldest()[SOLVER] <= 4 and len({t.rewards[SOLVER] for t in one.trajectories}) > 1
            )
            name = one.query.id.split("~")[0]
            uses[name] = uses.get(name, 0) + 1
    assert all(count <= options.times for count in uses.values())
    assert sum(uses.values()) <= 0.6 * steps + 1
    assert len(whole.state.groups) <= options.limit
