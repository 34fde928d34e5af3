"""Times of an engine: sums of their parts, which grow with the work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.inference.engine_times import RooflineTimes

TIMES = RooflineTimes(
    step_s=1.0, weights_s=10.0, token_s=0.5, context_token_s=0.01, pair_s=0.001, exchange_token_s=0.1,
    chunk_tokens=100, kv_tokens=1000,
)  # fmt: skip
BATCHES = st.integers(1, 1000)
TOKENS = st.integers(0, 100_000)


def test_a_decode_step_is_the_sum_of_its_parts() -> None:
    assert TIMES.decode_s(4, 200) == 1.0 + 10.0 + 200 * 0.01 + 4 * 0.1, "few sequences: the weights are read"
    assert TIMES.decode_s(40, 0) == 1.0 + 40 * 0.5 + 40 * 0.1, "many: their tokens are computed"


def test_prompts_add_to_steps_that_read_the_weights_in_any_case() -> None:
    assert TIMES.prefill_s([10], 4) == 10 * 0.1 + 0.001 * 50, "14 tokens take less than reading the weights"
    assert TIMES.prefill_s([60], 4) == (64 * 0.5 - 10.0) + 60 * 0.1 + 0.001 * 1800
    whole, rest = (104 * 0.5 - 10.0) + 100 * 0.1, (54 * 0.5 - 10.0) + 50 * 0.1
    assert abs(TIMES.prefill_s([150], 4) - (whole + rest + 0.001 * 150**2 / 2)) < 1e-9, "two chunks"
    assert TIMES.prefill_s([], 4) == 0.0


def test_prompts_with_forwards_of_their_own_take_no_part_in_those_of_others() -> None:
    apart = TIMES.model_copy(update={"prompts_apart": True, "chunk_s": 2.0})
    token_s = TIMES.token_s + TIMES.exchange_token_s
    chunk_s = 2.0 + TIMES.weights_s
    assert apart.prefill_s([10], 4) == pytest.approx(chunk_s + 10 * token_s + 0.001 * 50)
    assert apart.prefill_s([150], 4) == pytest.approx(2 * chunk_s + 150 * token_s + 0.001 * 150**2 / 2)
    assert apart.prefill_s([], 4) == 0.0
    assert apart.prompt_gives_token and not TIMES.prompt_gives_token


@given(batch=BATCHES, context=TOKENS, more=st.integers(1, 1000))
def test_a_step_takes_longer_with_more_sequences_and_with_more_context(
    batch: int, context: int, more: int
) -> None:
    assert TIMES.decode_s(batch + more, context) > TIMES.decode_s(batch, context)
    assert TIMES.decode_s(batch, context + more) > TIMES.decode_s(batch, context)


@given(prompts=st.lists(st.integers(1, 5000), min_size=1, max_size=20), batch=st.integers(0, 1000))
def test_longer_prompts_take_longer(prompts: list[int], batch: int) -> None:
    assert 0.0 < TIMES.prefill_s(prompts, batch) < TIMES.prefill_s([*prompts, 1], batch)
    first, *others = prompts
    assert TIMES.prefill_s([first + 1, *others], batch) > TIMES.prefill_s(prompts, batch)


@given(context=TOKENS, batch=BATCHES, steps=st.integers(1, 100))
def test_the_steps_of_a_batch_grow_evenly(context: int, batch: int, steps: int) -> None:
    """The engine sums up steps by the first and the growth from it to the second."""
    first = TIMES.decode_s(batch, context)
    growth = TIMES.decode_s(batch, context + batch) - first
    assert abs(TIMES.decode_s(batch, context + steps * batch) - (first + steps * growth)) < 1e-6 * steps
