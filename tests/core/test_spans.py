"""The recorder of a process: bounded, by key, and without a loss when an answer is lost."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.spans import LONGEST_NAME, SPAN_BYTES, LastSpans, SpanBatch, SpanRecorder, is_kept

from .span_batches import Row, rows_of, timeless_recorder

NUMBERS = (1, 2, 3, -1, 2**31 - 1, 0)


def add(recorder: SpanRecorder, kind: str, key: str = "", begin: float = 10.0) -> None:
    recorder.add(begin, begin + 1, ("lane", kind, "", "", ""), key, *NUMBERS, key=key)


def kinds(batch: SpanBatch) -> list[str]:
    return [row.label[1] for row in rows_of(batch)]


@given(
    st.lists(
        st.builds(
            Row,
            st.floats(0, 1e9),
            st.floats(0, 1e9),
            st.tuples(*[st.sampled_from(["", "a", "b", "ä"])] * 5),
            st.sampled_from(["", "q1", "q2"]),
            st.tuples(*[st.integers(-1, 2**31 - 1)] * 6),
        ),
        max_size=20,
    ),
    st.integers(1, 3),
)
def test_a_batch_has_each_span_as_it_was_added(rows: list[Row], times: int) -> None:
    recorder = timeless_recorder()
    for row in rows * times:
        recorder.add(row.begin, row.end, row.label, row.name, *row.numbers)
    assert rows_of(recorder.take(1.0, 0)) == rows * times


def test_times_are_those_of_the_clock_and_the_host_says_since_when() -> None:
    now, wall = 100.0, 1_790_000_000.0
    recorder = SpanRecorder(lambda: now, lambda: wall)
    begin = recorder.now()
    now, wall = now + 2, wall + 2 - 0.5  # the host's clock was set back meanwhile
    recorder.add(begin, recorder.now(), ("lane", "step", "", "", ""))
    [row] = rows_of(recorder.take(1.0, 0))
    assert row.end == wall and row.end - row.begin == 2.0


def test_a_number_that_does_not_fit_is_the_nearest_that_does() -> None:
    recorder = timeless_recorder()
    recorder.add(1.0, 2.0, ("lane", "kind", "", "", ""), "", 2**40, -(2**40), 7)
    [row] = rows_of(recorder.take(1.0, 0))
    assert row.numbers == (2**31 - 1, -1, 7, -1, -1, -1)


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


def test_the_last_spans_of_a_name_are_given_without_those_that_have_arrived_until_all_have() -> None:
    recorder, last_spans = SpanRecorder(), LastSpans()
    add(recorder, "a")
    first = recorder.take(1.0, 0)
    add(recorder, "b")
    last = recorder.take(1.0, 0)
    last_spans.add("actor", last)

    def given(received: int) -> list[str]:
        return kinds(last_spans.since({"actor": received})["actor"])

    assert given(0) == ["a", "b"]
    assert given(first.number) == ["b"], "the process did not hear that the first has arrived"
    assert given(last.number) == []
    assert given(last.number + 10**9) == ["a", "b"], "of a predecessor, by a clock that was set back since"
    last_spans.forget({"actor": first.number})
    assert given(first.number) == ["b"]
    last_spans.forget({"actor": last.number})
    assert last_spans.since({}) == {}


def test_a_full_buffer_counts_what_it_leaves_out() -> None:
    recorder = timeless_recorder(3 * SPAN_BYTES + len("lanea"))
    for _ in range(5):
        add(recorder, "a")
    batch = recorder.take(1.0, 0)
    assert len(kinds(batch)) == 3 and batch.dropped == 2
    add(recorder, "a")
    assert recorder.take(1.0, 0).dropped == 3, "a batch that may have to be sent again takes its room"
    recorder.take(1.0, batch.number + 1)
    add(recorder, "a")
    assert recorder.take(1.0, batch.number + 2).dropped == 3


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
    recorder = timeless_recorder(1000)
    label = "lane", "kind", "", "", ""
    recorder.add(1.0, 2.0, label, "q" * 10**6)
    batch = recorder.take(1.0, 0)
    assert [row.name for row in rows_of(batch)] == ["q" * LONGEST_NAME]
    recorder.add(1.0, 2.0, label, "r" * 400)
    batch = recorder.take(1.0, 0)
    recorder.add(1.0, 2.0, label, "s")
    batch = recorder.take(1.0, 0)
    assert batch.dropped == 1, "the two names, of batches that may be lost, have filled it"
    recorder.take(1.0, batch.number)
    recorder.add(1.0, 2.0, label, "s")
    batch = recorder.take(1.0, batch.number + 1)
    assert batch.dropped == 1 and [row.name for row in rows_of(batch)] == ["s"]
