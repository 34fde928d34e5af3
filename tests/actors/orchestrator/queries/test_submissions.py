"""Queries from outside, on their way into steps and back."""

import asyncio

import pytest

from flexmarl.actors.errors import QueriesRefused
from flexmarl.actors.messages import Query, QueryAnswer
from flexmarl.actors.names import AgentName, Step
from flexmarl.actors.orchestrator.queries import submissions
from flexmarl.actors.orchestrator.queries.submissions import Submissions
from flexmarl.actors.recipe.query_source import GroupEnd

SOLVER = AgentName("solver")


def queries(count: int) -> list[Query]:
    return [Query(f"q{n}", "2+2", {"n": n}) for n in range(count)]


def closed(step: int, query: str, reward: float = 1.0, dropped: str = "") -> GroupEnd:
    return GroupEnd(Query(query, ""), Step(step), {}, {SOLVER: [reward]}, {}, None, 0, dropped)


def next_queries(made: Submissions, step: int, most: int) -> list[Query]:
    return [made.next(step) for _ in range(min(most, made.waiting))]


async def submitted(made: Submissions, count: int) -> "asyncio.Task[list[QueryAnswer]]":
    task = asyncio.create_task(made.submit(queries(count)))
    await asyncio.sleep(0)
    return task


async def test_a_step_takes_as_many_as_it_has_room_for_and_the_next_one_the_rest() -> None:
    made = Submissions()
    waiting = await submitted(made, 3)
    first, second = next_queries(made, 4, 2), next_queries(made, 5, 2)
    assert [query.id for query in first + second] == ["submitted#0", "submitted#1", "submitted#2"]
    assert [query.data["n"] for query in first + second] == [0, 1, 2] and first[0].text == "2+2"
    assert made.waiting == 0
    made.closed(closed(5, "submitted#2", 0.5, "all its rewards are equal"))
    made.closed(closed(4, "submitted#1"))
    made.closed(closed(4, "submitted#1", 9.0))  # it has begun again
    assert not waiting.done()
    made.closed(closed(4, "submitted#0"))
    assert await waiting == [
        QueryAnswer("q0", Step(4), {SOLVER: [1.0]}, 0, ""),
        QueryAnswer("q1", Step(4), {SOLVER: [1.0]}, 0, ""),
        QueryAnswer("q2", Step(5), {SOLVER: [0.5]}, 0, "all its rewards are equal"),
    ]


async def test_those_of_a_caller_that_has_left_are_withdrawn() -> None:
    made = Submissions()
    left, stays = await submitted(made, 2), await submitted(made, 1)
    (first,) = next_queries(made, 1, 1)
    left.cancel()
    await asyncio.wait([left])
    assert [query.id for query in next_queries(made, 2, 9)] == ["submitted#1"]
    made.closed(closed(1, first.id))
    made.closed(closed(2, "submitted#1"))
    assert len(await stays) == 1


async def test_when_no_step_begins_any_more_those_that_wait_are_refused_and_the_others_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submissions, "_MOST_WAITING", 3)
    made = Submissions()
    begun = await submitted(made, 1)
    made.next(1)
    waits = await submitted(made, 3)
    with pytest.raises(QueriesRefused, match="3 queries wait for a step already, and at most 3 may"):
        await made.submit(queries(1))
    made.refuse("the last step has begun")
    made.refuse("the run has ended")
    for task in (waits, await submitted(made, 1)):
        with pytest.raises(QueriesRefused, match="the last step has begun"):
            await task
    made.closed(closed(1, "submitted#0"))
    assert len(await begun) == 1
