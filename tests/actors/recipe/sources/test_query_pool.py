"""The pool that sources choose from: what joins and leaves it, and what is given twice."""

from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.messages import Query
from flexmarl.actors.names import AgentName, Step
from flexmarl.actors.orchestrator.queries.position_source import PositionSource
from flexmarl.actors.recipe.query_source import GroupEnd, QuerySource
from flexmarl.actors.recipe.sources.band_source import BandConfig
from flexmarl.actors.recipe.sources.query_pool import PoolOptions, share_solved
from flexmarl.actors.recipe.sources.rare_success_source import RareSuccessConfig
from flexmarl.actors.recipe.sources.variance_source import VarianceConfig

OPTIONS = (VarianceConfig, RareSuccessConfig, BandConfig)


def source(options: PoolOptions, queries: int = 10**6) -> QuerySource:
    """``queries``: of the data set, which begins again after the last one."""
    return options.source(PositionSource(lambda n: Query(f"q{n % queries}", f"task {n}", {"n": n})), seed=1)


def ended(query: Query, step: int, share: float | None, trajectories: int = 4) -> GroupEnd:
    rewards = {AgentName("solver"): [0.0] * trajectories}
    return GroupEnd(query, Step(step), {}, rewards, {}, share, 0)


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=30)
@given(
    pool=st.integers(1, 12),
    fresh=st.sampled_from([0.0, 0.3, 1.0]),
    steps=st.integers(1, 8),
    count=st.integers(1, 6),
    queries=st.sampled_from([5, 10**6]),
)
def test_no_id_is_under_way_twice_and_the_pool_keeps_its_size(
    options: type[PoolOptions], pool: int, fresh: float, steps: int, count: int, queries: int
) -> None:
    pooled = source(options(pool=pool, fresh=fresh), queries)
    size = min(pool, queries)
    for step in range(1, steps + 1):
        drawn = [pooled.next(step) for _ in range(count)]
        assert len({query.id for query in drawn}) == count
        if size >= count and not fresh:
            assert len({query.id.partition("#")[0] for query in drawn}) == count
        for number, query in enumerate(drawn):
            pooled.closed(ended(query, step, number % 5 / 4))
        assert min(size, count) <= pooled.figures()["pool"] <= max(pool, count)


def test_a_query_that_comes_again_has_its_text_and_its_data_and_another_id() -> None:
    pooled = source(VarianceConfig(pool=1, fresh=0.0))
    ids = []
    for step in range(1, 4):
        query = pooled.next(step)
        assert (query.text, query.data) == ("task 0", {"n": 0})
        ids.append(query.id)
        pooled.closed(ended(query, step, 0.5))
    assert ids == ["q0", "q0#1", "q0#2"] and pooled.figures()["given_again"] == 2


def test_a_query_under_way_is_not_given_before_its_group_has_ended() -> None:
    pooled = source(VarianceConfig(pool=2, fresh=0.0))
    first, second, third = (pooled.next(1) for _ in range(3))
    assert {first.id, second.id} == {"q0", "q1"} and third.id == "q2", "the pool has no other"
    pooled.closed(ended(first, 1, 0.5))
    assert pooled.next(2).id == f"{first.id}#1"


def test_fresh_queries_push_out_those_that_teach_the_least() -> None:
    """Half of the pool is always solved; after as many fresh ones it is gone."""
    pooled = source(BandConfig(pool=8, fresh=0.5, drift=1.0))
    given: Counter[int] = Counter()
    for step in range(1, 60):
        query = pooled.next(step)
        position = query.data["n"]
        given[position] += step > 30
        pooled.closed(ended(query, step, 1.0 if position % 2 else 0.5))
    again = [position for position, count in given.items() if count > 2]
    assert again and not any(position % 2 for position in again)


@pytest.mark.parametrize("options", [VarianceConfig, BandConfig])
def test_queries_that_teach_come_more_often_than_in_turn(options: type[PoolOptions]) -> None:
    """One in eight queries differs in its rewards; all others are always solved, or never."""
    pooled = source(options(pool=64, fresh=0.0))
    taught = []
    for step in range(1, 101):
        drawn = [pooled.next(step) for _ in range(4)]
        for query in drawn:
            teaches = query.data["n"] % 8 == 0
            taught.append(teaches)
            pooled.closed(ended(query, step, 0.5 if teaches else float(query.data["n"] % 2)))
    assert fmean(taught[200:]) > 3 / 8


def test_a_query_that_is_solved_rarely_comes_more_often() -> None:
    pooled = source(RareSuccessConfig(pool=20, fresh=0.0))
    counts: Counter[int] = Counter()
    for step in range(1, 201):
        drawn = [pooled.next(step) for _ in range(2)]
        for query in drawn:
            kind = query.data["n"] % 4
            counts[kind] += step > 20
            pooled.closed(ended(query, step, (0.25, 0.75, 1.0, 0.0)[kind]))
    assert counts[0] > 2 * counts[1] > 4 * counts[2] and counts[0] > 4 * counts[3]


def test_the_share_of_the_trajectories_that_have_solved_a_query() -> None:
    query = Query("q", "")

    def end(success: float | None, **rewards: list[float]) -> GroupEnd:
        return GroupEnd(query, Step(1), {}, {AgentName(n): r for n, r in rewards.items()}, {}, success, 0)

    assert share_solved(end(0.5, solver=[0.0, 1.0])) == (0.5, 2)
    assert share_solved(end(None, solver=[0.0, 1.0, 1.0, 1.0], judge=[])) == (0.75, 4)
    assert share_solved(end(None, solver=[-3.0, -1.0], judge=[2.0, 6.0])) == (0.5, 2), "0 and 1"
    assert share_solved(end(None)) == (0.0, 0), "all failed: nothing is known"


def test_a_group_of_which_nothing_is_known_changes_nothing() -> None:
    pooled = source(VarianceConfig(pool=1, fresh=0.0))
    query = pooled.next(1)
    pooled.closed(GroupEnd(query, Step(1), {}, {}, {}, None, 4, "all failed"))
    assert "success" not in pooled.figures()
    again = pooled.next(2)
    pooled.closed(ended(again, 2, 1.0))
    assert pooled.figures()["success"] == pytest.approx(5 / 6)
