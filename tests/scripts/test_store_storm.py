"""A short storm over a store: writers and a trainer continue, and every acknowledged sample is consumed once."""

from .load import script


async def test_nothing_is_lost_and_nothing_comes_twice() -> None:
    made = await script("store_storm").storm(kills=4, seed=2)
    assert made.kills == 4 and len(made.acknowledged) > 4 * 64
