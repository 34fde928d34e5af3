"""The order of a search and its end, with made-up seconds in place of simulations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.names import PolicyName
from flexmarl.launch.simulate.planning.candidates import Candidate, PolicyRoom, Space, candidates
from flexmarl.launch.simulate.planning.search import Search

A = PolicyName("a")
ALL = list(candidates(Space(16, {A: PolicyRoom((1, 2, 4), (1, 2, 4, 8), 10.0, 64)}, 8, 64, ("intra", "off"))))


def play(search: Search, seconds: dict[Candidate, float]) -> list[Candidate]:
    order: list[Candidate] = []
    while (candidate := search.choose()) is not None:
        search.note(candidate, seconds[candidate])
        order.append(candidate)
    return order


@given(st.lists(st.floats(1.0, 9.0), min_size=len(ALL), max_size=len(ALL)), st.floats(1.0, 3.0))
def test_without_a_limit_it_finds_the_fastest(bounds: list[float], factor: float) -> None:
    """As long as a bound is one: then no candidate that is left out is faster."""
    search = Search(dict(zip(ALL, bounds, strict=True)), limit=len(ALL))
    seconds = {
        candidate: bound * (1 + (factor - 1) * (number % 3))
        for number, (candidate, bound) in enumerate(search.bounds.items())
    }
    order = play(search, seconds)
    assert search.fastest is not None and seconds[search.fastest] == min(seconds.values())
    assert len(order) == len(set(order)) and not search.remaining


def test_those_that_can_not_be_faster_are_never_simulated() -> None:
    bounds = dict.fromkeys(ALL, 10.0) | {ALL[7]: 1.0, ALL[8]: 3.0}
    search = Search(bounds, limit=len(ALL))
    assert play(search, {ALL[7]: 4.0, ALL[8]: 5.0}) == [ALL[7], ALL[8]]


def test_the_first_half_tries_different_splits_and_then_come_neighbours() -> None:
    search = Search(dict.fromkeys(ALL, 1.0), limit=8)
    order = play(search, {candidate: 5.0 + number for number, candidate in enumerate(ALL)})
    assert len(order) == 8 and len({candidate.split for candidate in order[:4]}) == 4
    assert all(ALL[0].differences(candidate) == 1 for candidate in order[4:])


def test_steps_below_their_bounds_lower_all_bounds() -> None:
    """The lengths of few steps may be short ones: then others may be below their bounds, too."""
    search = Search({ALL[0]: 8.0, ALL[1]: 8.5, ALL[2]: 30.0}, limit=9)
    search.note(ALL[0], 4.0)
    assert search.remaining == [ALL[1]]


def test_a_refused_split_is_not_tried_again() -> None:
    search = Search(dict.fromkeys(ALL, 1.0), limit=8)
    refused = search.choose()
    assert refused is not None
    search.refuse(refused, "too large")
    same = [other for other in ALL if (other.split, other.instances) == (refused.split, refused.instances)]
    assert len(same) > 1 and set(search.refusals) == set(same)
    chosen = search.choose()
    assert chosen is not None and chosen not in same


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_limit_ends_it(limit: int) -> None:
    search = Search(dict.fromkeys(ALL, 1.0), limit)
    assert len(play(search, dict.fromkeys(ALL, 5.0))) == limit
