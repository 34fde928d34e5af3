"""Spans of a run as records, and the attributes of a sample's id."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.sample_id import SampleId
from flexmarl.actors.spans import (
    KINDS,
    NUMBERS,
    OF_LABEL,
    OF_NAME,
    OF_QUERIES,
    Span,
    batch_number,
    place_of,
    record,
    record_time,
)
from flexmarl.core.spans import SpanRecorder

from ..core.span_batches import rows_of, timeless_recorder


def records(recorder: SpanRecorder) -> list[Span]:
    spans = []
    for begin, end, label, query, numbers in rows_of(recorder.take(1.0, 0)):
        attributes: dict[str, Any] = {**dict(zip(OF_LABEL, label, strict=True)), OF_NAME: query}
        attributes |= dict(zip(NUMBERS, numbers, strict=True))
        spans.append(Span(begin=begin, end=end, **attributes))
    return spans


def test_a_record_has_every_attribute_of_its_span() -> None:
    recorder = timeless_recorder()
    span = Span("solver-0", "generate", 1.0, 2.5, "q1", "solver", "shared", "a note", 3, 4, 5, 6, 7, 8)
    record(recorder, *span)
    record(recorder, *Span("router", "move", 3.0, 3.0))
    assert records(recorder) == [span, Span("router", "move", 3.0, 3.0)]


def test_the_share_is_of_queries_and_leaves_all_others() -> None:
    recorder = timeless_recorder()
    recorder.take(1e-9, 0)
    for kind in KINDS:
        record(recorder, *Span("lane", kind, 1.0, 2.0, query="q1"))
    assert {span.kind for span in records(recorder)} == KINDS.keys() - OF_QUERIES


def test_the_time_of_a_block_that_raises_is_no_span() -> None:
    recorder = timeless_recorder()
    with record_time(recorder, "trainer", "publish", policy="solver", version=3):
        pass
    with pytest.raises(KeyError), record_time(recorder, "trainer", "publish"):
        raise KeyError
    [span] = records(recorder)
    assert (span.policy, span.version) == ("solver", 3) and span.begin <= span.end


@given(st.one_of(st.none(), st.integers(0, 10**6)), st.text(), st.integers(0, 99), st.integers(0, 99))
def test_the_place_of_a_sample_is_that_of_its_id(
    step: int | None, query: str, turn: int, trajectory: int
) -> None:
    sample_id = str(SampleId(step, query, turn, trajectory))
    assert place_of(sample_id) == (-1 if step is None else step, query, turn, trajectory)


@pytest.mark.parametrize("name", ["a turn of no run", "a_b_c", "x:q_1_2", "1:q_one_2", ""])
def test_an_id_that_is_not_of_a_run_is_a_query(name: str) -> None:
    assert place_of(name) == (-1, name, -1, -1)


def test_the_number_of_a_micro_batch_fits_into_a_record() -> None:
    assert batch_number(2**62 + 5) == 5 and batch_number(7) == 7
