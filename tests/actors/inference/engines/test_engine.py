"""The statistics of engines: those of one that has replaced another."""

from dataclasses import fields

from flexmarl.actors.inference.engines.engine import EngineStatistics

PRESENT = {"batch_occupancy", "running", "waiting", "cache_tokens", "kept_tokens"}


def test_totals_are_those_of_both_engines_and_the_load_is_that_of_the_present_one() -> None:
    names = [field.name for field in fields(EngineStatistics)]
    former = EngineStatistics(*range(1, len(names) + 1))
    engine = EngineStatistics(*range(100, 100 + len(names)))
    both = engine.after(former)
    for place, name in enumerate(names):
        expected = 100 + place + (0 if name in PRESENT else 1 + place)
        assert getattr(both, name) == expected, name
