"""A real run whose policies take turns on one slot, and that is resumed: the trainer's log-probabilities of each sample
with an advantage are recorded once, and are the engine's up to rounding."""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import flexmarl
from flexmarl.actors.compared_logprobs import compared_of

from ...in_process import RunsHere

SETTINGS = (
    "pool.name=shared",
    "pool.slots=1",
    "training.steps=2",
    "evaluation.every=4",
    "checkpoint.every=2",
)


def compared_samples(run: Path) -> Counter[tuple[int, str, int, int]]:
    """Counts the entries of the file by step, query, trajectory and turn."""
    with closing(sqlite3.connect(run / "samples.sqlite")) as database:
        rows = database.execute("SELECT step, query, content FROM compared").fetchall()
    return Counter((step, query, *place) for step, query, content in rows for place in compared_of(content))


def test_each_sample_with_an_advantage_is_compared_once(runs_here: RunsHere) -> None:
    run = runs_here.train("compared", *SETTINGS)
    assert run.status == 0, run.text
    second = runs_here.resume("compared", "training.steps=4")
    assert second.status == 0, second.text
    counts = compared_samples(run.directory)
    assert set(counts.values()) == {1}
    trained: set[tuple[int, str, int, int]] = set()
    gaps: list[float] = []
    with flexmarl.Samples(run.directory) as samples:
        for one in samples.trajectories():
            for turn in one.turns:
                place = one.step, one.query.id, one.number, turn.number
                if one.evaluation or not turn.advantage:
                    assert not turn.trainer_logprobs, place
                    continue
                trained.add(place)
                assert turn.trainer_version == turn.version
                gaps += map(lambda a, b: abs(a - b), turn.trainer_logprobs, turn.logprobs)
    assert trained == counts.keys() and {step for step, *_ in trained} == {1, 2, 3, 4}
    assert 0 < max(gaps) < 1e-3, "float32 on both sides"


def test_no_share_records_none(runs_here: RunsHere) -> None:
    run = runs_here.train("plain", *SETTINGS, "samples.trainer_logprobs=0")
    assert run.status == 0, run.text
    assert not compared_samples(run.directory)
