"""Chunks of long prompts, keys and values that are used again, and their bounded memory: nothing else changes."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.errors import PromptTooLong
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult

from ..transformers_engines import (
    ARCHITECTURES,
    EOS,
    VOCABULARY,
    drain,
    make_engine,
    make_model,
    run_all,
    teacher_forced,
)


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=length))


def assert_equal(ours: dict[str, EngineResult], theirs: dict[str, EngineResult]) -> None:
    """The same tokens, and log-probabilities up to rounding."""
    assert {i: r.tokens for i, r in ours.items()} == {i: r.tokens for i, r in theirs.items()}
    for name, result in ours.items():
        assert result.logprobs == pytest.approx(theirs[name].logprobs, abs=1e-5)


def assert_true(name: str, requests: list[EngineRequest], results: dict[str, EngineResult]) -> None:
    reference = make_model(name)
    for request in requests:
        result = results[request.request_id]
        expected = teacher_forced(reference, request, result.tokens)
        torch.testing.assert_close(torch.tensor(result.logprobs).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_long_prompts_in_chunks_equal_a_full_forward(name: str) -> None:
    lengths = (150, 3, 16, 17, 100, 40, 5, 33)
    requests = [
        EngineRequest(f"r{n}", prompt_of(length, n), n, 1.0, 20 + n) for n, length in enumerate(lengths)
    ]
    engine = make_engine(name, prefill_chunk=16)
    assert_true(name, requests, run_all(engine, requests, arrivals=2))
    assert engine.statistics().prefill_chunks >= 10 + 7 + 3 + 3 + 2


def test_running_sequences_get_a_token_between_two_chunks() -> None:
    engine = make_engine(prefill_chunk=16, prefix_reuse=False)
    for n in range(3):
        engine.add(EngineRequest(f"r{n}", (n,), n, 1.0, 100))
    engine.step()
    engine.add(EngineRequest("long", prompt_of(16 * 8, 0), 9, 1.0, 10))
    while engine.statistics().prefill_chunks == 1:
        engine.step()
    for chunk in range(3, 10):
        before = engine.statistics()
        engine.step()
        after = engine.statistics()
        assert after.prefill_chunks == chunk and (after.waiting, after.running) == (0, 4)
        assert after.decoded_tokens - before.decoded_tokens == (4 if chunk == 9 else 3)


def test_short_prompts_take_turns_with_a_long_one() -> None:
    engine = make_engine(prefill_chunk=16, max_batch=32)
    engine.add(EngineRequest("long", prompt_of(16 * 9, 0), 0, 1.0, 10))
    engine.step()
    for n in range(4):
        engine.add(EngineRequest(f"r{n}", prompt_of(15, n + 1), n, 1.0, 50))
    for running in (2, 2, 3, 3, 4, 4):  # the long one counts from its first chunk on
        engine.step()
        assert engine.statistics().running == running
    assert {name for name, _ in drain(engine).items()} == {"long", "r0", "r1", "r2", "r3"}


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_long_prompt_can_be_aborted_between_chunks(rows: int) -> None:
    running = [EngineRequest(f"r{n}", (n, n), n, 1.0, 40) for n in range(rows)]
    engine = make_engine(prefill_chunk=16)
    expected = run_all(make_engine(), running)
    for request in running:
        engine.add(request)
    engine.step()
    engine.add(EngineRequest("long", prompt_of(120, 0), 0, 1.0, 10))
    while engine.statistics().running == rows:
        engine.step()
    engine.step()
    assert engine.abort("long") == EngineResult("long", (), (), "interrupted")
    assert engine.statistics().running == rows and engine.pending == rows
    assert_equal(drain(engine), expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_conversation_computes_only_what_is_new(name: str) -> None:
    engine = make_engine(name, prefill_chunk=32)
    history = prompt_of(40, 0)
    for turn in range(4):
        before = engine.statistics()
        request = EngineRequest(f"t{turn}", history, turn, 1.0, 12)
        results = run_all(engine, [request])
        assert_true(name, [request], results)
        after = engine.statistics()
        known = 0 if turn == 0 else len(history) - 5 - 1  # the last token of an answer was never an input
        assert after.reused_tokens - before.reused_tokens == known
        assert after.prompt_tokens - before.prompt_tokens == len(history)
        history += results[request.request_id].tokens + prompt_of(5, 100 + turn)


def test_a_group_computes_its_prompt_once_even_if_it_arrives_over_time() -> None:
    prompt = prompt_of(60, 0)
    requests = [EngineRequest(f"r{n}", prompt, n, 1.0, 30) for n in range(8)]
    engine = make_engine()
    results = run_all(engine, requests, arrivals=2)
    assert_true("qwen3-grouped", requests, results)
    assert engine.statistics().reused_tokens == 6 * 59  # the first two are computed together


def test_a_common_beginning_is_computed_once_by_requests_that_arrive_together() -> None:
    common = prompt_of(60, 0)
    requests = [EngineRequest(f"r{n}", common + prompt_of(7, n), n, 1.0, 30) for n in range(8)]
    engine = make_engine()
    results = run_all(engine, requests, arrivals=8)
    assert_true("qwen3-grouped", requests, results)
    assert engine.statistics().reused_tokens == 7 * 60


@settings(max_examples=15)
@given(st.integers(0, 1 << 30), st.sampled_from([16, 40, 512]), st.sampled_from([40, 120, 100_000]))
def test_reuse_changes_no_token(seed: int, chunk: int, rows: int) -> None:
    """Conversations and groups in any company, with a cache of ``rows`` times 200 tokens."""
    draw = random.Random(seed)
    texts = [prompt_of(draw.randint(1, 80), draw.randrange(3)) for _ in range(4)]
    requests = []
    for n in range(24):
        prompt = draw.choice(texts)[: draw.randint(1, 80)] + prompt_of(draw.randint(0, 30), draw.randrange(4))
        requests.append(EngineRequest(f"r{n}", prompt, n % 5, 0.9, draw.randint(1, 30)))
        if draw.random() < 0.5:
            texts.append(prompt)
    expected = run_all(make_engine(stops=[EOS], prefix_reuse=False), requests)
    token_bytes = make_engine(max_batch=1)._cache.token_bytes
    engine = make_engine(stops=[EOS], prefill_chunk=chunk, kv_cache_bytes=rows * 5 * token_bytes)
    for _ in range(2):
        assert_equal(run_all(engine, requests, arrivals=draw.randint(1, 6)), expected)
        statistics = engine.statistics()
        assert statistics.cache_tokens + statistics.kept_tokens <= rows * 5


def test_without_reuse_a_result_does_not_depend_on_what_was_before() -> None:
    """Bit for bit, as long as one turn is generated at a time."""
    requests = [EngineRequest(f"r{n}", prompt_of(30 + n, 0), n, 1.0, 20) for n in range(6)]
    options: dict[str, Any] = {"max_batch": 1, "prefill_chunk": 16, "prefix_reuse": False}
    engine = make_engine(**options)
    forwards = run_all(engine, requests)
    assert run_all(engine, requests[::-1]) == forwards
    assert all(run_all(make_engine(**options), [request])[request.request_id] == forwards[request.request_id]
               for request in requests)  # fmt: skip
    assert engine.statistics().reused_tokens == engine.statistics().kept_tokens == 0


def test_new_weights_drop_what_was_kept() -> None:
    requests = [EngineRequest(f"r{n}", prompt_of(40, n), n, 1.0, 20) for n in range(4)]
    engine = make_engine()
    run_all(engine, requests)
    assert engine.statistics().kept_tokens > 0
    source = make_model(seed=1).state_dict()
    for name, tensor in engine.weights().items():
        tensor.copy_(source[name])
    engine.weights_loaded(engine.weights())
    assert engine.statistics().kept_tokens == 0
    assert run_all(engine, requests) == run_all(make_engine(seed=1), requests)
    assert engine.statistics().reused_tokens == 0


def test_what_does_not_fit_waits_and_what_never_fits_is_refused() -> None:
    token_bytes = make_engine()._cache.token_bytes
    engine = make_engine(kv_cache_bytes=107 * token_bytes, max_batch=8)  # columns are multiples of 8
    requests = [EngineRequest(f"r{n}", (1, 2, n), n, 1.0, 37) for n in range(5)]
    with pytest.raises(
        PromptTooLong, match=r"90 prompt tokens \+ 15 .* memory .* 104 tokens: .*kv_cache_bytes"
    ):
        engine.add(EngineRequest("never", prompt_of(90, 0), 0, 1.0, 15))
    with pytest.raises(PromptTooLong, match="context of 200 tokens: .*max_context"):
        engine.add(EngineRequest("never", prompt_of(190, 0), 0, 1.0, 11))
    for request in requests:
        engine.add(request)
    results: dict[str, EngineResult] = {}
    while engine.pending:
        results |= {result.request_id: result for result in engine.step()}
        statistics = engine.statistics()
        assert statistics.running <= 2 and statistics.cache_tokens + statistics.kept_tokens <= 104
    assert_equal(results, run_all(make_engine(), requests))
    whole = EngineRequest("whole", prompt_of(90, 0), 0, 1.0, 14)
    assert_true("qwen3-grouped", [whole], run_all(engine, [whole]))
