"""The form of a recorded trajectory on its way into the run's file."""

import numpy as np
import pytest

from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import (
    RecordedTrajectory,
    RecordedTurn,
    SampleRow,
    compress_record,
    pack_record,
    rows_of,
    turns_of,
    unpack_record,
)

TURNS = (
    RecordedTurn(0, "solver", ("2+2=",), "4", 4, (20, 2), (-0.5, -0.25), 3, "stop", 1.0, 0.5),
    RecordedTurn(1, "judge", (0, {"role": "user", "content": "ok?"}), "yes", 9, (7,), (-1.5,), 2, "length"),
)
QUERY = Query("q7", "2+2", {"answer": 4})
DONE = RecordedTrajectory(5, False, QUERY, 1, {"solver": 1.0, "judge": 0.0}, {"accuracy": 1.0}, "", TURNS)
FAILED = RecordedTrajectory(5, False, QUERY, 2, failure="ValueError: no answer", turns=TURNS[:1])


def test_a_record_has_rows_to_filter_by_and_closed_content() -> None:
    record = unpack_record(compress_record(pack_record([DONE, FAILED])))
    assert (record.step, record.evaluation, record.query, record.text) == (5, False, "q7", "2+2")
    assert (record.number, record.trajectories) == (1, 2)
    done, failed = rows_of(record.rows)
    assert (done.number, done.reward, done.rewards, done.metrics) == (
        1,
        0.5,
        {"solver": 1.0, "judge": 0.0},
        {"accuracy": 1.0},
    )
    assert [SampleRow(*row) for row in done.samples] == [
        SampleRow(0, "solver", 1.0, 0.5, 3, 2, "stop"),
        SampleRow(1, "judge", None, None, 2, 1, "length"),
    ]
    assert (failed.number, failed.reward, failed.failure) == (2, None, "ValueError: no answer")
    assert turns_of(record.content) == [TURNS, TURNS[:1]]


def test_rewards_of_turns_are_the_trajectorys_if_it_has_no_other() -> None:
    paid = DONE._replace(
        rewards={}, turns=(TURNS[0]._replace(reward=0.25), TURNS[0]._replace(reward=0.75), TURNS[1])
    )
    assert (paid.reward, DONE.reward) == (0.5, 0.5)
    assert paid._replace(turns=TURNS[1:]).reward is None


def test_columns_of_arrays_and_text_that_is_not_unicode_are_recorded_too() -> None:
    columns = {"plan": np.array([[1, 2]], np.int32), "score": np.float32(0.5)}
    turn = TURNS[0]._replace(text="\ud800", columns=columns)
    record = unpack_record(compress_record(pack_record([DONE._replace(turns=(turn,))])))
    ((found,),) = turns_of(record.content)
    assert found.text == "\ud800" and found.columns == {"plan": [[1, 2]], "score": 0.5}


def test_names_are_those_of_the_store() -> None:
    assert DONE.name == "5:q7_1"
    assert DONE._replace(evaluation=True).name == "eval:q7_1"


@pytest.mark.parametrize("damaged", [b"", b"\x93\x01\x02\x03", b"\xc1"])
def test_a_damaged_record_is_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="not a record"):
        unpack_record(damaged)


@pytest.mark.parametrize("damaged", [b"", b"x", compress_record(pack_record([DONE]))])
def test_damaged_content_is_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="damaged"):
        turns_of(damaged)
    with pytest.raises(ValueError, match="damaged"):
        rows_of(damaged)


def test_only_long_content_is_compressed() -> None:
    long = TURNS[0]._replace(text="4" * 10_000)
    for turn, is_smaller in ((TURNS[0], False), (long, True)):
        record = pack_record([DONE._replace(turns=(turn,))])
        arrived = unpack_record(compress_record(record))
        assert (len(arrived.content) < len(record.content)) == is_smaller
        assert turns_of(arrived.content) == turns_of(record.content) == [(turn,)]
