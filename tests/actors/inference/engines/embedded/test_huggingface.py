"""The embedded engine against plain forwards of the same model."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.errors import NonFiniteLogits
from flexmarl.actors.inference.engines.engine import EngineRequest

from ....trainer.backends.torch_policy.waits import counted_waits
from ..transformers_engines import (
    ARCHITECTURES,
    EOS,
    VOCABULARY,
    drain,
    make_engine,
    make_model,
    make_requests,
    run_all,
    teacher_forced,
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_equal_a_full_forward(name: str) -> None:
    # more requests than rows, arriving over time, ended by eos or by length: rows are freed, moved and reused
    requests = make_requests(30)
    results = run_all(make_engine(name, stops=[EOS, EOS + 1]), requests)
    reference = make_model(name)
    assert {result.finish_reason for result in results.values()} == {"stop", "length"}
    for request in requests:
        result = results[request.request_id]
        expected = teacher_forced(reference, request, result.tokens)
        torch.testing.assert_close(torch.tensor(result.logprobs).double(), expected, atol=1e-5, rtol=0)


def test_a_generation_ends_at_its_first_eos_or_its_limit() -> None:
    requests = make_requests(30)
    for request, result in ((r, run_all(make_engine(stops=[EOS]), [r])[r.request_id]) for r in requests[:10]):
        assert EOS not in result.tokens[:-1]
        ended = result.tokens[-1] == EOS
        assert result.finish_reason == ("stop" if ended else "length")
        assert ended or len(result.tokens) == request.max_new_tokens
        assert len(result.logprobs) == len(result.tokens)


def test_draws_do_not_depend_on_the_company() -> None:
    requests = make_requests(24, seed=1)
    together = run_all(make_engine(stops=[EOS]), requests, arrivals=5)
    shuffled = random.Random(2).sample(requests, len(requests))
    assert {
        i: r.tokens for i, r in run_all(make_engine(stops=[EOS], max_batch=3), shuffled, arrivals=1).items()
    } == {i: r.tokens for i, r in together.items()}
    for request in requests:
        alone = run_all(make_engine(stops=[EOS]), [request])
        assert alone[request.request_id].tokens == together[request.request_id].tokens


def test_another_seed_draws_otherwise() -> None:
    requests = [EngineRequest(str(seed), (1, 2, 3), seed, 1.0, 12) for seed in range(6)]
    results = run_all(make_engine(), requests)
    assert len({result.tokens for result in results.values()}) > 1


@pytest.mark.parametrize("name", ["qwen3-grouped", "llama-plain"])
def test_greedy_equals_generate(name: str) -> None:
    requests = make_requests(6, temperature=0.0)
    results = run_all(make_engine(name), requests)
    reference: Any = make_model(name)
    for request in requests:
        prompt = torch.tensor([request.prompt_tokens])
        generated = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            pad_token_id=0,
        )
        assert results[request.request_id].tokens == tuple(generated[0, prompt.shape[1] :].tolist())


def test_the_first_tokens_follow_the_softmax() -> None:
    engine = make_engine(max_batch=64)
    count = 4000
    results = run_all(
        engine, [EngineRequest(str(i), (3, 1, 4), i, 1.0, 1) for i in range(count)], arrivals=count
    )
    seen = torch.zeros(VOCABULARY)
    for result in results.values():
        seen[result.tokens[0]] += 1
    logits = make_model()(input_ids=torch.tensor([[3, 1, 4]])).logits[0, -1]
    expected = torch.softmax(logits, -1) * count
    common = expected > 5
    chi_square = ((seen - expected)[common] ** 2 / expected[common]).sum()
    # mean k, variance 2k: six standard deviations
    assert chi_square < common.sum() + 6 * (2 * common.sum()) ** 0.5
    assert seen[~common].sum() < expected[~common].sum() + 6 * expected[~common].sum() ** 0.5 + 1


def test_a_long_generation_grows_the_cache_and_stays_right() -> None:
    requests = [EngineRequest(f"r{i}", (i,) * (1 + 30 * i), i, 1.0, 130) for i in range(3)]
    results = run_all(make_engine(), requests)
    reference = make_model()
    for request in requests:
        result = results[request.request_id]
        expected = teacher_forced(reference, request, result.tokens)
        torch.testing.assert_close(torch.tensor(result.logprobs).double(), expected, atol=1e-5, rtol=0)


def test_prompts_beyond_one_prefill_are_computed_in_several() -> None:
    requests = make_requests(8, seed=3)
    at_once = run_all(make_engine(), requests, arrivals=8)
    in_groups = run_all(make_engine(prefill_chunk=64), requests, arrivals=8)
    assert {i: r.tokens for i, r in in_groups.items()} == {i: r.tokens for i, r in at_once.items()}


def test_single_arrivals_wait_for_company_but_not_for_ever() -> None:
    engine = make_engine(max_batch=32)
    for i in range(20):
        engine.add(EngineRequest(f"early{i}", (1,), i, 1.0, 100))
    engine.step()
    engine.add(EngineRequest("late", (2,), 0, 1.0, 100))
    waited = 0
    while engine.statistics().waiting:
        engine.step()
        waited += 1
    assert 1 < waited <= 8


def test_aborting_one_leaves_the_others_untouched() -> None:
    requests = [EngineRequest(f"r{i}", (i + 1, i + 2), i, 1.0, 40) for i in range(6)]
    expected = run_all(make_engine(), requests, arrivals=6)
    engine = make_engine()
    for request in requests:
        engine.add(request)
    for _ in range(5):
        assert engine.step() == []
    assert engine.abort("r1") and engine.abort("r4")
    rest = drain(engine)
    assert {i: r.tokens for i, r in rest.items()} == {
        i: r.tokens for i, r in expected.items() if i not in ("r1", "r4")
    }


@settings(max_examples=20)
@given(
    interruptions=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_what_is_interrupted_anywhere_goes_on_as_if_it_had_not_been(
    interruptions: list[int], temperature: float
) -> None:
    engine = make_engine(stops=[EOS])
    requests = [EngineRequest(f"r{i}", (i + 1, i + 2), i, temperature, 40) for i in range(5)]
    whole = run_all(engine, requests, arrivals=5)
    so_far: dict[str, tuple[int, ...]] = dict.fromkeys(whole, ())
    for steps in [*interruptions, 40]:
        for request in requests:
            done = so_far[request.request_id]
            if len(done) < len(whole[request.request_id].tokens):
                prompt, left = request.prompt_tokens + done, 40 - len(done)
                engine.add(
                    replace(request, prompt_tokens=prompt, max_new_tokens=left, resumed_tokens=len(done))
                )
        for _ in range(steps):
            for result in engine.step():
                so_far[result.request_id] += result.tokens
        for name in so_far:
            if (part := engine.abort(name)) is not None:
                assert part.finish_reason == "interrupted" and len(part.tokens) == len(part.logprobs)
                so_far[name] += part.tokens
        assert not engine.pending
    assert so_far == {name: result.tokens for name, result in whole.items()}


def test_a_result_survives_the_failure_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.add(EngineRequest("long", (1, 2), 0, 1.0, 30))
    engine.step()
    engine.add(EngineRequest("short", (1, 2), 0, 1.0, 1))
    decode = engine._forward.decode
    monkeypatch.setattr(engine._forward, "decode", lambda *args: decode(*args) * torch.nan)
    with pytest.raises(NonFiniteLogits, match="long"):
        engine.step()
    assert engine.pending == 2 and engine.abort("long") and engine.pending == 1
    assert [result.request_id for result in engine.step()] == ["short"]


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.booleans()), max_size=6), max_size=12
    )
)
def test_every_request_comes_back_exactly_once(schedule: list[list[tuple[int, int, bool]]]) -> None:
    """``schedule``: per step the arrivals as (prompt length, tokens wanted, whether to abort it after)."""
    engine = make_engine(stops=[EOS], max_batch=4)
    numbers = itertools.count()
    returned: list[str] = []
    owed: set[str] = set()
    for arrivals in schedule:
        doomed = []
        for prompt, wanted, abort in arrivals:
            number = next(numbers)
            engine.add(EngineRequest(str(number), (number % VOCABULARY,) * prompt, number, 1.0, wanted))
            owed.add(str(number))
            if abort:
                doomed.append(str(number))
        returned += [result.request_id for result in engine.step()]
        for name in doomed:
            assert (engine.abort(name) is not None) == (name not in returned)
            if name not in returned:
                owed.remove(name)
    returned += drain(engine)
    assert sorted(returned) == sorted(owed)
    assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)


@pytest.mark.parametrize("name", ["qwen3-grouped", "gpt2"])
def test_a_decode_step_waits_for_the_device_once(name: str) -> None:
    engine = make_engine(name)
    for request in make_requests(4, temperature=0.7):
        engine.add(replace(request, max_new_tokens=12))
    engine.step()
    with counted_waits() as waits:
        for _ in range(5):
            engine.step()
    assert [wait.partition(" ")[0] for wait in waits] == ["tolist"] * 5, waits
