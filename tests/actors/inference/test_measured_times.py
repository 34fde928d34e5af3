"""Times of an engine from tables."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.inference.measured_times import MeasuredTimes

TABLES: dict[str, Any] = {
    "step_s": 1.0, "batches": [1, 4], "contexts": [100, 200], "decode": [[10, 12], [16, 24]],
    "prompt_tokens": [100, 200], "products": [15, 30], "attention": [0, 5], "chunk_tokens": 200, "kv_tokens": 1000,
}  # fmt: skip


def times(**changes: Any) -> MeasuredTimes:
    return MeasuredTimes.model_validate({**TABLES, **changes})


def test_a_decode_step_is_linear_between_entries() -> None:
    assert times().decode_s(1, 100) == 11.0
    assert times().decode_s(4, 800) == 25.0
    assert times().decode_s(1, 150) == 12.0
    assert times().decode_s(2, 300) == pytest.approx(1 + (2 / 3) * 11 + (1 / 3) * 20)


def test_beyond_the_last_entry_it_grows_with_the_work_and_below_the_first_it_stays() -> None:
    assert times().decode_s(1, 300) == 1 + 12 * 1.5
    assert times().decode_s(8, 800) == 1 + 16 * 2
    assert times().decode_s(1, 10) == 11.0


def test_a_prompt_adds_what_the_step_does_not_read_anyway() -> None:
    assert times().prefill_s([100], 0) == 5.0
    assert times().prefill_s([200], 0) == 25.0
    assert times().prefill_s([100, 100], 4) == 20.0, "two short prompts have less attention than a long one"
    assert times().prefill_s([100, 200], 4) == 20.0 + 5.0 + 5.0, "two chunks"
    assert times().prefill_s([], 4) == 0.0
    assert times().room_tokens == 1000


def test_tables_never_fall() -> None:
    measured = times(decode=[[10, 9], [8, 24]], products=[15, 14], attention=[3, 2])
    assert [*measured.decode] == [(10, 10), (10, 24)]
    assert [*measured.products, *measured.attention] == [15, 15, 3, 3]


entries = st.lists(st.floats(0.001, 100.0), min_size=3, max_size=3)


@given(
    st.lists(entries, min_size=3, max_size=3), st.integers(1, 64), st.integers(1, 64), st.floats(1, 1e5),
    st.floats(1, 1e5),
)  # fmt: skip
def test_times_grow_with_sequences_and_context(
    decode: list[list[float]], batch: int, more: int, context: float, longer: float
) -> None:
    measured = times(batches=[1, 8, 32], contexts=[10, 100, 1000], decode=decode)
    before = measured.decode_s(batch, context * batch)
    assert measured.decode_s(batch, (context + longer) * batch) >= before * (1 - 1e-9)
    assert measured.decode_s(batch + more, context * (batch + more)) >= before * (1 - 1e-9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode": [[10, 12]]}, "decode has 1 rows"),
        ({"decode": [[10, 12], [10, 12]], "batches": [4, 4]}, "batches do not ascend"),
        ({"products": [1, 2, 3]}, "products has 3 entries for 2"),
    ],
)
def test_tables_that_are_not_whole_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        times(**changes)


def test_an_engine_reads_them_from_its_config() -> None:
    config = SimulatedEngineConfig.model_validate({"measured_times": times().model_dump(mode="json")})
    assert config.engine_times() == times() and config.prompt_steps(100) == 0.0
