"""Groups are trained in the order in which they close, or in that of their queries."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.messages import GroupClosed
from flexmarl.actors.names import Step
from flexmarl.actors.orchestrator.closing_order import ClosingOrder

S = Step


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
