"""The contract of query sources, held against every one: restored from its state it continues as if it had never been
interrupted, and its state is plain data."""

import json
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.messages import Query
from flexmarl.actors.names import AgentName, Step
from flexmarl.actors.orchestrator.queries.position_source import PositionSource
from flexmarl.actors.recipe.query_source import GroupEnd, QuerySource
from flexmarl.actors.recipe.sources.band_source import BandConfig
from flexmarl.actors.recipe.sources.rare_success_source import RareSuccessConfig
from flexmarl.actors.recipe.sources.replay_source import ReplayConfig, ReplaySource
from flexmarl.actors.recipe.sources.source_options import SourceOptions
from flexmarl.actors.recipe.sources.variance_source import VarianceConfig


def of_position(position: int) -> Query:
    return Query(f"q{position % 7}", f"task {position}", {"key": b"\0", "position": position})


def positions() -> PositionSource:
    return PositionSource(of_position)


def named(options: SourceOptions) -> Callable[[], QuerySource]:
    return lambda: options.source(positions(), seed=3)


SOURCES: dict[str, Callable[[], QuerySource]] = {
    "positions": positions,
    "replay": lambda: ReplaySource(positions(), share=0.3, limit=3, times=2),
    "replay of a replay": lambda: ReplaySource(ReplaySource(positions(), share=0.5), share=0.5, limit=2),
    "replay by name": named(ReplayConfig(share=0.3, limit=3, times=2)),
    "variance": named(VarianceConfig(pool=4, fresh=0.3)),
    "rare successes": named(RareSuccessConfig(pool=5, fresh=0.0)),
    "band": named(BandConfig(pool=3, fresh=0.5, explore=0.5)),
    "a pool of one": named(VarianceConfig(pool=1)),
}
END = st.sampled_from([0.0, 0.5, 1.0, None])
# Queries of each step, then how the groups of any of the open queries ended.
Steps = list[tuple[int, list[tuple[int, float | None]]]]
STEPS = st.lists(st.tuples(st.integers(0, 5), st.lists(st.tuples(st.integers(0, 9), END))), max_size=12)


def ended(query: Query, step: int, success: float | None) -> GroupEnd:
    rewards = {AgentName("solver"): [0.0, 1.0] if success == 0.5 else []}
    return GroupEnd(query, Step(step), {}, rewards, {}, success, failures=0 if success is not None else 2)


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=60)
@given(steps=STEPS, interrupted=st.randoms(use_true_random=True))
def test_a_restored_source_continues(name: str, steps: Steps, interrupted: Random) -> None:
    """Two sources get the same calls; one is often replaced by another that is restored from its state."""
    whole, current = SOURCES[name](), SOURCES[name]()
    still_open: list[tuple[Query, int]] = []
    for step, (count, ends) in enumerate(steps, 1):
        if interrupted.random() < 0.5:
            state = current.state()
            text = json.dumps(state, allow_nan=False)
            assert json.loads(text) == state, "as a checkpoint gives it back"
            current = SOURCES[name]()
            current.restore(json.loads(text))
            assert current.state() == state
        for _ in range(count):
            query = whole.next(step)
            assert current.next(step) == query
            still_open.append((query, step))
        assert current.figures() == whole.figures()
        for number, success in ends:
            if still_open:
                query, given_in = still_open.pop(number % len(still_open))
                for source in (whole, current):
                    source.closed(ended(query, given_in, success))
