"""Queries from outside, on their way into steps and back."""

import asyncio

import pytest

from flexmarl.actors.errors import QueriesRefused
from flexmarl.actors.messages import (
    AnsweredTrajectory,
    AnsweredTurn,
    GroupClosed,
    GroupWaiting,
    LoggedGroup,
    LoggedTrajectory,
    LoggedTurn,
    Query,
    QueryAnswer,
)
from flexmarl.actors.names import AgentName, Step, Version
from flexmarl.actors.orchestrator.queries import submissions
from flexmarl.actors.orchestrator.queries.submissions import Submissions

SOLVER = AgentName("solver")


def queries(count: int) -> list[Query]:
    return [Query(f"q{n}", "2+2", {"n": n}) for n in range(count)]


def closed(step: int, query: str, reward: float = 1.0, dropped: str = "") -> GroupClosed:
    return GroupClosed(Step(step), query, {}, {}, 0.0, {}, [], dropped, trajectories=rewarded(reward))


def rewarded(reward: float) -> list[AnsweredTrajectory]:
    return [AnsweredTrajectory({SOLVER: reward}, {}, [])]


def next_queries(made: Submissions, step: int, most: int) -> list[Query]:
    return made.take(Step(step), (), most)


async def submitted(made: Submissions, count: int, first: int = 0) -> "asyncio.Task[list[QueryAnswer]]":
    task = asyncio.create_task(made.submit(queries(first + count)[first:]))
    await asyncio.sleep(0)
    return task


async def test_a_step_takes_as_many_as_it_has_room_for_and_the_next_one_the_rest() -> None:
    made = Submissions()
    waiting = await submitted(made, 3)
    first, second = next_queries(made, 4, 2), next_queries(made, 5, 2)
    assert [query.id for query in first + second] == ["q0", "q1", "q2"]
    assert [query.data["n"] for query in first + second] == [0, 1, 2] and first[0].text == "2+2"
    assert made.waiting == 0
    made.closed(closed(5, "q2", 0.5, "all its rewards are equal"))
    made.closed(closed(4, "q1"))
    made.closed(closed(4, "q1", 9.0))  # it has begun again
    assert not waiting.done()
    made.closed(closed(4, "q0"))
    assert await waiting == [
        QueryAnswer("q0", Step(4), rewarded(1.0), 0, ""),
        QueryAnswer("q1", Step(4), rewarded(1.0), 0, ""),
        QueryAnswer("q2", Step(5), rewarded(0.5), 0, "all its rewards are equal"),
    ]


async def test_those_of_a_caller_that_has_left_are_withdrawn() -> None:
    made = Submissions()
    left, stays = await submitted(made, 2), await submitted(made, 1, first=2)
    (first,) = next_queries(made, 1, 1)
    left.cancel()
    await asyncio.wait([left])
    assert [query.id for query in next_queries(made, 2, 9)] == ["q2"]
    made.closed(closed(1, first.id))
    made.closed(closed(2, "q2"))
    assert len(await stays) == 1


async def test_when_no_step_begins_any_more_those_that_wait_are_refused_and_the_others_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submissions, "_MOST_WAITING", 3)
    made = Submissions()
    begun = await submitted(made, 1)
    made.take(Step(1), ())
    waits = await submitted(made, 3, first=1)
    with pytest.raises(QueriesRefused, match="3 queries wait for a step already, and at most 3 may"):
        await made.submit(queries(1))
    made.refuse("the last step has begun")
    made.refuse("the run has ended")
    for task in (waits, await submitted(made, 1, first=1)):
        with pytest.raises(QueriesRefused, match="the last step has begun"):
            await task
    made.closed(closed(1, "q0"))
    assert len(await begun) == 1


async def test_an_id_that_is_under_way_is_refused_until_its_answer() -> None:
    made = Submissions()
    with pytest.raises(
        QueriesRefused, match="another submitted query with the id 'q0' is under way: choose another"
    ):
        await made.submit(queries(1) * 2)
    waits = await submitted(made, 1)
    with pytest.raises(QueriesRefused, match="with the id 'q0' is under way"):
        await made.submit(queries(1))
    made.take(Step(3), ())
    with pytest.raises(QueriesRefused, match="with the id 'q0' is under way"):
        await made.submit(queries(1))
    made.closed(closed(3, "q0"))
    assert len(await waits) == 1
    again = await submitted(made, 1)
    made.take(Step(4), ())
    made.closed(closed(3, "q0", 9.0))  # the first one has begun again with a lost host
    assert not again.done()
    made.closed(closed(4, "q0"))
    assert (await again)[0].step == 4


def test_an_answer_has_the_rewards_and_the_last_texts_of_its_trajectories() -> None:
    turns = [AnsweredTurn(SOLVER, f"3:q_{n}_0", text, Version(2), None) for n, text in enumerate("ab")]
    trajectories = [AnsweredTrajectory({SOLVER: 0.5}, {}, turns), AnsweredTrajectory({SOLVER: 1.0}, {}, [])]
    answer = QueryAnswer("q", Step(3), trajectories, 0, "")
    assert (answer.rewards, answer.texts) == ({SOLVER: [0.5, 1.0]}, ["b", ""])


async def test_a_query_whose_id_the_step_has_used_waits_for_the_next_one() -> None:
    made = Submissions()
    waits = await submitted(made, 3)
    assert [query.id for query in made.take(Step(1), {"q1"})] == ["q0", "q2"]
    assert [query.id for query in made.take(Step(2), {"q0"})] == ["q1"]
    waits.cancel()


async def test_a_program_that_waits_for_no_rewards_is_answered_when_they_alone_are_missing() -> None:
    notified: list[int] = []
    made = Submissions()
    made.notify = lambda: notified.append(made.waiting)
    early = asyncio.create_task(made.submit(queries(1), judged=False))
    late = await submitted(made, 1, first=1)
    assert notified == [1, 2]
    made.take(Step(2), ())
    for name in ("q0", "q1", "drawn"):
        made.waits(GroupWaiting(Step(2), name, {}, 1, 3, rewarded(0.0)))
    assert await early == [QueryAnswer("q0", Step(2), rewarded(0.0), 3, "")] and not late.done()
    with pytest.raises(QueriesRefused, match="with the id 'q0' is under way"):
        await made.submit(queries(1))
    made.closed(closed(2, "q0"))
    made.end("the run has ended")
    with pytest.raises(QueriesRefused, match="the run has ended"):
        await late


def logged(name: str, version: Version | None = None) -> LoggedGroup:
    turn = LoggedTurn(SOLVER, [], "4", (1,), (2,), (-0.5,), 1.0, version)
    return LoggedGroup(Query(name, "2+2"), [LoggedTrajectory([turn], {SOLVER: 1.0})])


async def test_logged_answers_of_the_run_begin_like_queries_and_those_of_others_wait_in_a_line_of_their_own() -> (
    None
):
    made = Submissions()
    noticed: list[int] = []
    made.notify = lambda: noticed.append(made.waiting)
    waiting = asyncio.create_task(
        made.submit_logged([logged("old"), logged("own", Version(3)), logged("older")])
    )
    await asyncio.sleep(0)
    assert noticed == [3]
    assert [query.id for query in made.take(Step(4), ())] == ["own"]
    assert [query.id for query in made.take_logged(Step(4), {"old"}, 2)] == ["older"]
    assert made.logged(Step(4), "own") == logged("own", Version(3)).trajectories and not made.logged(
        Step(4), "q"
    )
    with pytest.raises(QueriesRefused, match="'old' is under way"):
        await made.submit_logged([logged("old")])
    made.closed(closed(4, "own"), Step(5))
    made.closed(closed(4, "older", dropped="all its rewards are equal"))
    assert [query.id for query in made.take_logged(Step(5), (), 2)] == ["old"]
    made.closed(closed(5, "old"))
    assert [(answer.query, answer.step, answer.dropped) for answer in await waiting] == [
        ("old", 5, ""),
        ("own", 5, ""),
        ("older", 4, "all its rewards are equal"),
    ]
    assert made.trained_until(Step(4)) == {} and made.trained_until(Step(5)) == {"old": 5, "own": 5}


async def test_a_resumed_run_trains_no_logged_name_again_and_answers_those_that_no_step_takes() -> None:
    made = Submissions({"old": Step(5)})
    waiting = asyncio.create_task(made.submit_logged([logged("old"), logged("new")]))
    await asyncio.sleep(0)
    made.refuse("no further step begins")
    assert await waiting == [
        QueryAnswer("old", Step(5), [], 0, ""),
        QueryAnswer("new", Step(0), [], 0, "no further step begins"),
    ]


async def test_logged_answers_whose_program_has_gone_are_withdrawn() -> None:
    made = Submissions()
    waiting = asyncio.create_task(made.submit_logged([logged("old"), logged("own", Version(3))]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not made.take(Step(1), ()) and not made.take_logged(Step(1), (), 2) and not made.waiting
