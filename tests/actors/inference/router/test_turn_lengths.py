"""Predicted lengths: the formula by hand, what is forgotten, and the order of turns that follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.inference.router import turn_lengths
from flexmarl.actors.inference.router.router import Router
from flexmarl.actors.inference.router.router_config import RouterConfig
from flexmarl.actors.inference.router.turn_lengths import LENGTHS, Lengths, MeanLengths, QueryLengths
from flexmarl.actors.names import Version

from .router_events import A, asked, routes


def test_the_mean_of_all_turns_counts_as_one_more_turn_of_the_topic() -> None:
    lengths = QueryLengths()
    assert lengths.expected("q") == 0.0
    for topic, tokens in (("p", 10), ("p", 20), ("q", 90)):
        lengths.ended(topic, tokens)
    assert lengths.mean.value == pytest.approx(40.0)
    assert lengths.expected("q") == pytest.approx((40 + 90) / 2)
    assert lengths.expected("p") == pytest.approx((40 + 10 + 20) / 3)
    assert lengths.expected("new") == pytest.approx(40.0)


def test_a_topic_follows_its_newest_turns() -> None:
    lengths = QueryLengths()
    for tokens in [10] * 40 + [1000] * 40:
        lengths.ended("q", tokens)
    weight, total = lengths._topics["q"]
    assert weight == pytest.approx(16.0)
    assert total / weight == pytest.approx(1000 - 990 * (15 / 16) ** 40)


def test_the_topics_that_ended_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_lengths, "_REMEMBERED", 2)
    lengths = QueryLengths()
    for topic in ("a", "b", "a", "c"):
        lengths.ended(topic, 100 if topic == "b" else 10)
    assert lengths.expected("b") == lengths.mean.value and list(lengths._topics) == ["a", "c"]


@given(
    st.sampled_from([*LENGTHS]), st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9999)), min_size=1)
)
def test_every_prediction_is_between_the_shortest_and_the_longest_turn(
    name: Lengths, turns: list[tuple[str, int]]
) -> None:
    lengths = LENGTHS[name]()
    for topic, tokens in turns:
        lengths.ended(topic, tokens)
    sizes = [tokens for _, tokens in turns]
    for topic in "abcd":
        assert min(sizes) - 1e-6 <= lengths.expected(topic) <= max(sizes) + 1e-6


@pytest.mark.parametrize(("name", "order"), [("mean", [2, 3, 4]), ("query", [3, 4, 2])])
def test_turns_that_are_expected_to_be_long_begin_first(name: Lengths, order: list[int]) -> None:
    router = Router([A], RouterConfig(lengths=name))
    (number,) = router.joined("x", (A,), 1, 0.0)
    router.published(A, Version(0), 0.0)
    router.loaded(number, Version(0), 0.0)
    router.decisions(0.0)
    for turn, topic, tokens in ((0, "short", 10), (1, "long", 190)):
        router.requested(1, asked(turn, topic=topic), 0.0)
        assert list(routes(router, float(turn))) == [turn]
        router.ended(1, turn, tokens, 20.0)
    router.requested(1, asked(9), 20.0)
    assert list(routes(router, 20.0)) == [9]
    for turn, topic in ((2, "short"), (3, "long"), (4, "new")):
        router.requested(1, asked(turn, topic=topic), 20.0)
    found = []
    for before in (9, *order[:2]):
        router.ended(1, before, 0, 30.0)
        found += list(routes(router, 30.0))
    assert found == order


def test_the_load_of_an_instance_counts_predictions() -> None:
    mean, query = MeanLengths(), QueryLengths()
    for lengths in (mean, query):
        lengths.ended("q", 100)
        lengths.ended("p", 300)
    assert (mean.expected("p"), query.expected("p"), query.expected("q")) == (200.0, 250.0, 150.0)
