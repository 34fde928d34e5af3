"""A short storm over a store: writers and a trainer continue, and every acknowledged sample is consumed once."""

from scripts.bench.store_storm import storm


async def test_nothing_is_lost_and_nothing_comes_twice() -> None:
    made = await storm(strikes=4, seed=2)
    assert made.strikes == 4 and len(made.acknowledged) > 4 * 64


async def test_nor_if_it_is_stopped_for_longer_than_the_heartbeats_and_its_clock_steps() -> None:
    made = await storm(strikes=3, seed=4, faults="mixed", clock=True)
    assert made.strikes == 3 and len(made.acknowledged) > 3 * 64
