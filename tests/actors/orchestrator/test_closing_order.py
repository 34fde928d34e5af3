"""Queries: each once, in order, also with replacements. Groups: in the order they close, or of their queries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.messages import GroupClosed
from flexmarl.actors.names import Step
from flexmarl.actors.orchestrator.closing_order import ClosingOrder, QueryOrder

S = Step


def test_refills_move_the_next_step_on() -> None:
    order = QueryOrder(10)
    assert [*order.begin(S(1), 3)] == [10, 11, 12]
    assert [*order.more(1)] == [13]
    assert order.position_after(S(1)) == 14
    assert [*order.begin(S(2), 3)] == [14, 15, 16]
    order.more(2)
    assert order.position_after(S(1)) == 14, "draws of the next step do not count for this one"
    assert order.position_after(S(2)) == 19


def test_a_refill_may_not_repeat_an_id_of_its_step() -> None:
    order = QueryOrder(0)
    order.begin(S(1), 2)
    order.name(S(1), ["x", "y"])
    with pytest.raises(RecipeError, match="step 1 has two queries with the id 'x'"):
        order.name(S(1), ["x"])
    order.begin(S(2), 1)
    order.name(S(2), ["x"])


def group(step: int, query: str) -> GroupClosed:
    return GroupClosed(S(step), query, {}, {}, 0.0, {}, [])


def test_groups_are_handed_on_as_they_close() -> None:
    order = ClosingOrder("arrival")
    order.begun(S(1), ["a", "b"])
    assert [closed.query for closed in order.closed(group(1, "b"))] == ["b"]


@given(st.permutations("abcde"), st.permutations("abcde"))
def test_deterministic_groups_are_handed_on_in_the_order_of_their_queries(first: str, second: str) -> None:
    order = ClosingOrder("query")
    order.begun(S(1), "abc")
    order.begun(S(1), "de")  # a replacement
    order.begun(S(2), "abcde")
    handed: dict[int, list[str]] = {1: [], 2: []}
    seen: dict[int, set[str]] = {1: set(), 2: set()}
    for query_of_1, query_of_2 in zip(first, second, strict=True):  # strict has two steps under way
        for step, query in ((1, query_of_1), (2, query_of_2)):
            seen[step].add(query)
            handed[step] += [closed.query for closed in order.closed(group(step, query))]
            ready = next((n for n, name in enumerate("abcde") if name not in seen[step]), 5)
            assert handed[step] == list("abcde"[:ready])
    order.end(S(1))
    order.end(S(2))


def test_a_step_with_submitted_queries_draws_fewer_and_a_resumed_run_skips_none() -> None:
    order = QueryOrder(10)
    drawn = [order.begin(Step(step), count) for step, count in ((1, 3), (2, 1), (3, 0), (4, 3))]
    assert drawn == [range(10, 13), range(13, 14), range(14, 14), range(14, 17)]
    assert [order.position_after(Step(step)) for step in (1, 2, 3, 4)] == [13, 14, 14, 17]
