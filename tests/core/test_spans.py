"""The recorder of a process: bounded, by key, and without a loss when an answer is lost."""

from flexmarl.core.spans import LONGEST_NAME, NAMES, RECORD, SpanBatch, SpanRecorder, is_kept

NUMBERS = (1, 2, 3, -1, 2**31 - 1, 0)


def add(recorder: SpanRecorder, kind: str, key: str = "", begin: float = 10.0) -> None:
    recorder.add(begin, begin + 1, ("lane", kind, key, "", "", ""), NUMBERS, key)


def kinds(batch: SpanBatch) -> list[str]:
    return [batch.names[record[3]] for record in RECORD.iter_unpack(batch.records.view)]


def test_a_batch_has_each_span_with_its_names_and_numbers() -> None:
    recorder = SpanRecorder()
    add(recorder, "step")
    recorder.add(7.0, 6.0, ("other", "step", "q1", "", "", ""), (-1,) * 6)
    batch = recorder.take(1.0, 0)
    first, second = RECORD.iter_unpack(batch.records.view)
    assert first[:2] == (10.0, 11.0) and first[2 + NAMES :] == NUMBERS
    assert [batch.names[entry] if entry >= 0 else "" for entry in first[2 : 2 + NAMES]] == [
        "lane", "step", "", "", "", "",
    ]  # fmt: skip
    assert second[:2] == (7.0, 7.0), "a clock that was set back makes no negative time"
    assert [batch.names[entry] for entry in second[2:5]] == ["other", "step", "q1"]


def test_a_batch_that_was_lost_comes_again_with_the_next_one() -> None:
    recorder = SpanRecorder()
    add(recorder, "a")
    first = recorder.take(1.0, 0)
    add(recorder, "b", "q1")
    second = recorder.take(1.0, 0)
    assert kinds(second) == ["a", "b"], "the first has not arrived"
    add(recorder, "c")
    third = recorder.take(1.0, second.number)
    assert kinds(third) == ["c"]
    assert kinds(recorder.take(1.0, third.number)) == []
    assert first.number < second.number < third.number


def test_a_full_buffer_counts_what_it_leaves_out() -> None:
    recorder = SpanRecorder(most_bytes=3 * RECORD.size)
    for _ in range(5):
        add(recorder, "a")
    batch = recorder.take(1.0, 0)
    assert len(kinds(batch)) == 3 and batch.dropped == 2
    add(recorder, "a")
    assert recorder.dropped == 3, "a batch that may have to be sent again takes its room"
    recorder.take(1.0, batch.number)
    add(recorder, "a")
    assert recorder.dropped == 3


def test_of_a_share_of_all_keys_all_spans_are_kept_and_of_the_others_none() -> None:
    recorder = SpanRecorder()
    recorder.take(0.3, 0)
    queries = [f"q{number}" for number in range(1000)]
    for query in queries:
        add(recorder, "turn", query)
        add(recorder, "sample", query)
    add(recorder, "optimizer")
    batch = recorder.take(0.3, 0)
    kept = [query for query in queries if is_kept(query, 0.3)]
    assert 200 < len(kept) < 400
    assert kinds(batch) == ["turn", "sample"] * len(kept) + ["optimizer"], (
        "a span without a key is always kept"
    )
    assert {query for query in queries if is_kept(query, 0.1)} < {*kept}


def test_a_share_of_zero_records_nothing() -> None:
    recorder = SpanRecorder()
    recorder.take(0.0, 0)
    add(recorder, "optimizer")
    assert kinds(recorder.take(0.0, 0)) == []


def test_names_take_room_and_a_long_one_is_cut() -> None:
    spans = SpanRecorder(most_bytes=1000)
    spans.add(1.0, 2.0, ("lane", "kind", "q" * 10**6, "", "", ""), (-1,) * 6)
    batch = spans.take(1.0, 0)
    assert batch.names == ("lane", "kind", "q" * LONGEST_NAME)
    spans.add(1.0, 2.0, ("lane", "kind", "r" * 400, "", "", ""), (-1,) * 6)
    spans.add(1.0, 2.0, ("lane", "kind", "s", "", "", ""), (-1,) * 6)
    assert spans.dropped == 1, "the two names, one of them not known to have arrived, have filled it"
    spans.take(1.0, batch.number)
    spans.take(1.0, spans.take(1.0, batch.number).number)
    spans.add(1.0, 2.0, ("lane", "kind", "s", "", "", ""), (-1,) * 6)
    assert spans.dropped == 1
