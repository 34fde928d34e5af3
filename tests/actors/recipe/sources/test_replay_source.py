"""Queries that are given again: which, how many, and for how long."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.messages import Query
from flexmarl.actors.names import AgentName, Step
from flexmarl.actors.orchestrator.queries.position_source import PositionSource
from flexmarl.actors.recipe.query_source import GroupEnd
from flexmarl.actors.recipe.sources.replay_source import ReplaySource, is_unsolved

SOLVER, JUDGE = AgentName("solver"), AgentName("judge")


def positions() -> PositionSource:
    return PositionSource(lambda position: Query(f"q{position}", f"task {position}", {"position": position}))


def ended(query: Query, success: float | None = 0.0, **rewards: list[float]) -> GroupEnd:
    return GroupEnd(query, Step(1), {}, {AgentName(name): of for name, of in rewards.items()}, {}, success, 0)


@pytest.mark.parametrize(
    ("end", "repeated"),
    [
        (ended(Query("q", ""), 0.0, solver=[0.0, 0.5]), True),
        (ended(Query("q", ""), 0.25, solver=[0.0, 0.0, 0.0, 1.0]), False),
        (ended(Query("q", ""), 1.0, solver=[1.0, 1.0]), False),
        (ended(Query("q", ""), None, solver=[], judge=[]), True),
        (ended(Query("q", ""), None, solver=[0.5, 0.5], judge=[1.0, 1.0]), True),
        (ended(Query("q", ""), None, solver=[0.5, 0.5], judge=[0.0, 1.0]), False),
    ],
)
def test_the_queries_that_are_unsolved(end: GroupEnd, repeated: bool) -> None:
    assert is_unsolved(end) is repeated


def test_an_unsolved_query_comes_again_under_a_new_id_until_it_is_solved() -> None:
    source = ReplaySource(positions(), share=1.0)
    first = source.next(1)
    source.closed(ended(first))
    again = source.next(2)
    assert again == Query("q0#1", "task 0", {"position": 0})
    assert source.figures() == {"given_again": 1, "waiting": 0}
    assert source.next(2).id == "q1"
    source.closed(ended(again))
    assert source.next(3).id == "q0#2"
    source.closed(ended(Query("q0#2", ""), 1.0))
    assert source.next(4).id == "q2" and source.figures() == {"given_again": 2, "waiting": 0}


def test_a_query_that_is_never_solved_is_given_up() -> None:
    source = ReplaySource(positions(), share=1.0, times=2)
    query = source.next(1)
    ids = []
    for step in range(2, 6):
        source.closed(ended(query))
        query = source.next(step)
        ids.append(query.id)
        if "#" not in query.id:
            break
    assert ids == ["q0#1", "q0#2", "q1"]


def test_the_oldest_makes_room() -> None:
    source = ReplaySource(positions(), share=1.0, limit=2)
    for query in [source.next(1) for _ in range(4)]:
        source.closed(ended(query))
    assert source.figures()["waiting"] == 2
    assert [source.next(2).text for _ in range(3)] == ["task 2", "task 3", "task 4"]


@given(share=st.floats(0.0, 1.0), steps=st.integers(1, 20), solved_until=st.integers(0, 10))
def test_no_more_than_the_share_is_given_again(share: float, steps: int, solved_until: int) -> None:
    """Not even after a time in which all were solved."""
    source = ReplaySource(positions(), share=share, times=99)
    given_again = Counter[int]()
    for step in range(1, steps + 1):
        queries = [source.next(step) for _ in range(4)]
        given_again[step] = sum("#" in query.id for query in queries)
        assert source.figures()["given_again"] == given_again.total()
        for query in queries:
            source.closed(ended(query, float(step <= solved_until)))
    assert given_again.total() <= share * 4 * steps + 1e-6
    assert max(given_again.values()) <= share * 4 + 1 + 1e-6


def test_a_source_of_its_own_hears_of_its_queries_alone() -> None:
    class Listening(PositionSource):
        heard: list[str] = []  # noqa: RUF012

        def closed(self, group: GroupEnd) -> None:
            self.heard.append(group.query.id)

        def figures(self) -> dict[str, float]:
            return {"heard": len(self.heard)}

    source = ReplaySource(Listening(lambda position: Query(f"q{position}", "")), share=1.0)
    source.closed(ended(source.next(1)))
    source.closed(ended(source.next(2), 1.0))
    assert Listening.heard == ["q0"] and source.figures()["heard"] == 1


def test_an_own_rule_decides() -> None:
    source = ReplaySource(positions(), share=1.0, repeat=lambda group: group.success == 1.0)
    for query in [source.next(1), source.next(1)]:
        source.closed(ended(query, float(query.id == "q1")))
    assert source.next(2).text == "task 1"


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"share": -0.1}, {"limit": 0}, {"times": 0}])
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="0 to 1, at least 1, at least 1"):
        ReplaySource(positions(), **wrong)  # type: ignore[arg-type]
