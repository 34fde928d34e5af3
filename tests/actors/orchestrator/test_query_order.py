"""Queries: each once, in order, whatever is refilled."""

import pytest

from flexmarl.actors.orchestrator.query_order import QueryOrder
from flexmarl.core.errors import RecipeError


def test_refills_move_the_next_step_on() -> None:
    order = QueryOrder(10)
    assert [*order.begin(1, 3)] == [10, 11, 12]
    assert [*order.more(1)] == [13]
    assert order.position_after(1) == 14
    assert [*order.begin(2, 3)] == [14, 15, 16]
    order.more(2)
    assert order.position_after(1) == 14, "what the next step draws is no matter of this one"
    assert order.position_after(2) == 19


def test_a_refill_may_not_repeat_an_id_of_its_step() -> None:
    order = QueryOrder(0)
    order.begin(1, 2)
    order.name(1, ["x", "y"])
    with pytest.raises(RecipeError, match="step 1 has two queries with the id 'x'"):
        order.name(1, ["x"])
    order.begin(2, 1)
    order.name(2, ["x"])
