"""Shapley values: games with known values, and the axioms."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.launch.credit.shapley import Coalition, coalitions_of, orders_of, shapley_values

ABC = ("a", "b", "c")


def values_of(agents: tuple[str, ...], worth: Callable[[Coalition], float]) -> dict[str, float]:
    orders = orders_of(agents, 0)
    values = shapley_values(orders, {team: np.array(worth(team)) for team in coalitions_of(orders)})
    return {agent: float(value) for agent, value in values.items()}


def test_the_glove_game() -> None:
    """One left glove and two right ones, a pair is worth 1 (Osborne and Rubinstein): 2/3, 1/6, 1/6."""
    values = values_of(ABC, lambda team: float("a" in team and len(team) > 1))
    assert values == pytest.approx({"a": 2 / 3, "b": 1 / 6, "c": 1 / 6})


def test_the_airport_game() -> None:
    """The costs of a runway for aeroplanes that need 1, 2 and 3 of it (Littlechild and Owen, 1973)."""
    costs = {"a": 1.0, "b": 2.0, "c": 3.0}
    values = values_of(ABC, lambda team: max((costs[agent] for agent in team), default=0.0))
    assert values == pytest.approx({"a": 1 / 3, "b": 1 / 3 + 1 / 2, "c": 1 / 3 + 1 / 2 + 1})


WORTHS = st.integers(1, 4).flatmap(
    lambda count: st.lists(st.floats(-10, 10), min_size=2**count, max_size=2**count).map(
        lambda numbers: (tuple("abcd"[:count]), numbers)
    )
)


def teams_of(agents: tuple[str, ...]) -> list[Coalition]:
    return [
        frozenset(team) for size in range(len(agents) + 1) for team in itertools.combinations(agents, size)
    ]


@given(WORTHS)
def test_values_add_up_to_the_gain_of_all(game: tuple[tuple[str, ...], list[float]]) -> None:
    agents, numbers = game
    worth = dict(zip(teams_of(agents), numbers, strict=True))
    values = values_of(agents, worth.__getitem__)
    assert sum(values.values()) == pytest.approx(worth[frozenset(agents)] - worth[frozenset()], abs=1e-9)


@given(WORTHS)
def test_an_agent_that_adds_nothing_has_no_value_and_equal_agents_have_equal_ones(
    game: tuple[tuple[str, ...], list[float]],
) -> None:
    agents, numbers = game
    worth = dict(zip(teams_of(agents), numbers, strict=True))
    twin = f"{agents[0]}2"
    values = values_of(
        (*agents, "idle", twin),
        lambda team: worth[frozenset(agents) & {agent.removesuffix("2") for agent in team}],
    )
    assert values["idle"] == pytest.approx(0.0, abs=1e-9)
    assert values[twin] == pytest.approx(values[agents[0]], abs=1e-9)


def test_values_of_each_query_are_those_of_its_own_game() -> None:
    orders = orders_of(ABC, 0)
    worth = {team: np.array([len(team), float("a" in team)]) for team in coalitions_of(orders)}
    values = shapley_values(orders, worth)
    assert values["a"] == pytest.approx([1.0, 1.0]) and values["b"] == pytest.approx([1.0, 0.0])


def test_drawn_orders_are_pairs_of_reverses_and_repeat_by_their_seed() -> None:
    agents = tuple("abcdefgh")
    orders = orders_of(agents, 10, seed=3)
    assert orders == orders_of(agents, 10, seed=3) != orders_of(agents, 10, seed=4)
    assert len(set(orders)) == 10 and all(order[::-1] in orders for order in orders)
    teams = coalitions_of(orders)
    assert teams[0] == frozenset() and teams[-1] == frozenset(agents)
    assert len(teams) <= 10 * len(agents) + 1


def test_more_draws_than_orders_are_all_orders() -> None:
    assert len(set(orders_of(tuple("abcdefg"), 6000))) == 5040


def test_drawn_orders_come_near_to_all_of_them() -> None:
    """Eight agents whose worth is the square of their number have the value 8 each, by symmetry."""
    orders = orders_of(tuple("abcdefgh"), 60)
    values = shapley_values(orders, {team: np.array(len(team) ** 2) for team in coalitions_of(orders)})
    assert sum(values.values()) == pytest.approx(64)
    assert all(value == pytest.approx(8, abs=2) for value in values.values())
