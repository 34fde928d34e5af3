"""The embedded engine against plain forwards of the same model."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flexmarl.actors.errors import NonFiniteLogits, RequestsInFlight, UnsupportedModel
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.inference.engines.huggingface import TransformersEngine
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model, load_model

VOCABULARY = 48
EOS = 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _heads(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3-grouped": {"model_type": "qwen3", **_heads(4, 2, 32)},
    "qwen3-one-kv-head": {"model_type": "qwen3", **_heads(6, 1, 16)},
    "llama-plain": {"model_type": "llama", **_heads(2, 2, 32)},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **_heads(4, 2, 8)},
    "gpt2": {"model_type": "gpt2", "n_head": 2, "n_inner": 48},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _config(name: str, **changes: Any) -> dict[str, Any]:
    return SIZES | ARCHITECTURES[name] | changes


def _model(name: str = "qwen3-grouped", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers
        AutoConfig.for_model(**_config(name)), attn_implementation="sdpa"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # a fresh model is nearly uniform: nothing would depend on the context
    model.train(False)
    model.requires_grad_(False)
    return model


def _engine(name: str = "qwen3-grouped", stops: Iterable[int] = (), max_batch: int = 8, seed: int = 0) -> Any:
    return TransformersEngine(_model(name, seed), frozenset(stops), max_batch=max_batch, max_context=200)


def _requests(count: int, seed: int = 0, temperature: float | None = None) -> list[EngineRequest]:
    pick = random.Random(seed)
    return [
        EngineRequest(
            f"r{i}",
            tuple(pick.randrange(VOCABULARY) for _ in range(pick.choice([1, 2, 5, 17, 60]))),
            seed=pick.randrange(1 << 62),
            temperature=pick.choice([1.0, 0.7, 0.0]) if temperature is None else temperature,
            max_new_tokens=pick.choice([1, 2, 9, 40]),
        )
        for i in range(count)
    ]


def _drain(engine: TransformersEngine) -> dict[str, EngineResult]:
    results: dict[str, EngineResult] = {}
    while engine.pending:
        for result in engine.step():
            assert result.request_id not in results
            results[result.request_id] = result
    return results


def _run(
    engine: TransformersEngine, requests: list[EngineRequest], arrivals: int = 3
) -> dict[str, EngineResult]:
    """Give the engine ``arrivals`` requests before each step."""
    results: list[EngineResult] = []
    for first in range(0, len(requests), arrivals):
        for request in requests[first : first + arrivals]:
            engine.add(request)
        results += engine.step()
    by_id = {result.request_id: result for result in results}
    by_id.update(_drain(engine))
    return by_id


@torch.no_grad()
def _teacher_forced(model: PreTrainedModel, request: EngineRequest, tokens: tuple[int, ...]) -> torch.Tensor:
    """float64 [tokens]: log-probabilities by one full forward without a cache."""
    sequence = torch.tensor([request.prompt_tokens + tokens])
    logits = model(input_ids=sequence, use_cache=False).logits[0, len(request.prompt_tokens) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / (request.temperature or 1.0), -1)
    return logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_equal_a_full_forward(name: str) -> None:
    # more requests than rows, arriving over time, ended by eos or by length: rows are freed, moved and reused
    requests = _requests(30)
    results = _run(_engine(name, stops=[EOS, EOS + 1]), requests)
    reference = _model(name)
    assert {result.finish_reason for result in results.values()} == {"stop", "length"}
    for request in requests:
        result = results[request.request_id]
        expected = _teacher_forced(reference, request, result.tokens)
        torch.testing.assert_close(torch.tensor(result.logprobs).double(), expected, atol=1e-5, rtol=0)


def test_a_generation_ends_at_its_first_eos_or_its_limit() -> None:
    requests = _requests(30)
    for request, result in ((r, _run(_engine(stops=[EOS]), [r])[r.request_id]) for r in requests[:10]):
        assert EOS not in result.tokens[:-1]
        ended = result.tokens[-1] == EOS
        assert result.finish_reason == ("stop" if ended else "length")
        assert ended or len(result.tokens) == request.max_new_tokens
        assert len(result.logprobs) == len(result.tokens)


def test_draws_do_not_depend_on_the_company() -> None:
    requests = _requests(24, seed=1)
    together = _run(_engine(stops=[EOS]), requests, arrivals=5)
    shuffled = random.Random(2).sample(requests, len(requests))
    assert {
        i: r.tokens for i, r in _run(_engine(stops=[EOS], max_batch=3), shuffled, arrivals=1).items()
    } == {i: r.tokens for i, r in together.items()}
    for request in requests:
        alone = _run(_engine(stops=[EOS]), [request])
        assert alone[request.request_id].tokens == together[request.request_id].tokens


def test_another_seed_draws_otherwise() -> None:
    requests = [EngineRequest(str(seed), (1, 2, 3), seed, 1.0, 12) for seed in range(6)]
    results = _run(_engine(), requests)
    assert len({result.tokens for result in results.values()}) > 1


@pytest.mark.parametrize("name", ["qwen3-grouped", "llama-plain"])
def test_greedy_equals_generate(name: str) -> None:
    requests = _requests(6, temperature=0.0)
    results = _run(_engine(name), requests)
    reference: Any = _model(name)
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
    engine = _engine(max_batch=64)
    count = 4000
    results = _run(
        engine, [EngineRequest(str(i), (3, 1, 4), i, 1.0, 1) for i in range(count)], arrivals=count
    )
    seen = torch.zeros(VOCABULARY)
    for result in results.values():
        seen[result.tokens[0]] += 1
    logits = _model()(input_ids=torch.tensor([[3, 1, 4]])).logits[0, -1]
    expected = torch.softmax(logits, -1) * count
    common = expected > 5
    chi_square = ((seen - expected)[common] ** 2 / expected[common]).sum()
    # mean k, variance 2k: six standard deviations
    assert chi_square < common.sum() + 6 * (2 * common.sum()) ** 0.5
    assert seen[~common].sum() < expected[~common].sum() + 6 * expected[~common].sum() ** 0.5 + 1


def test_a_long_generation_grows_the_cache_and_stays_right() -> None:
    requests = [EngineRequest(f"r{i}", (i,) * (1 + 30 * i), i, 1.0, 130) for i in range(3)]
    results = _run(_engine(), requests)
    reference = _model()
    for request in requests:
        result = results[request.request_id]
        expected = _teacher_forced(reference, request, result.tokens)
        torch.testing.assert_close(torch.tensor(result.logprobs).double(), expected, atol=1e-5, rtol=0)


def test_prompts_beyond_one_prefill_are_computed_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _requests(8, seed=3)
    at_once = _run(_engine(), requests, arrivals=8)
    monkeypatch.setattr("flexmarl.actors.inference.engines.huggingface.PREFILL_TOKENS", 64)
    in_groups = _run(_engine(), requests, arrivals=8)
    assert {i: r.tokens for i, r in in_groups.items()} == {i: r.tokens for i, r in at_once.items()}


def test_single_arrivals_wait_for_company_but_not_for_ever() -> None:
    engine = _engine(max_batch=32)
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
    expected = _run(_engine(), requests, arrivals=6)
    engine = _engine()
    for request in requests:
        engine.add(request)
    for _ in range(5):
        assert engine.step() == []
    assert engine.abort("r1") and engine.abort("r4")
    rest = _drain(engine)
    assert {i: r.tokens for i, r in rest.items()} == {
        i: r.tokens for i, r in expected.items() if i not in ("r1", "r4")
    }


@settings(deadline=None, max_examples=20)
@given(
    interruptions=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_what_is_interrupted_anywhere_goes_on_as_if_it_had_not_been(
    interruptions: list[int], temperature: float
) -> None:
    engine = _engine(stops=[EOS])
    requests = [EngineRequest(f"r{i}", (i + 1, i + 2), i, temperature, 40) for i in range(5)]
    whole = _run(engine, requests, arrivals=5)
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


def test_new_weights_are_used_and_nothing_is_left_of_the_old() -> None:
    requests = _requests(8)
    engine = _engine()
    before = _run(engine, requests)
    source = _model(seed=1).state_dict()
    assert engine.weights().keys() == source.keys()
    for name, tensor in engine.weights().items():
        tensor.copy_(source[name])
    engine.weights_loaded()
    after = _run(engine, requests)
    assert after == _run(_engine(seed=1), requests)
    assert after != before


def test_weights_may_not_change_under_a_request() -> None:
    engine = _engine()
    engine.add(EngineRequest("r", (1,), 0, 1.0, 3))
    with pytest.raises(RequestsInFlight, match="1 requests"):
        engine.weights_loaded()


def test_broken_weights_are_reported_and_can_be_replaced() -> None:
    engine = _engine()
    requests = _requests(6)
    good = {name: tensor.clone() for name, tensor in engine.weights().items()}
    expected = _run(engine, requests)
    for tensor in engine.weights().values():
        tensor.fill_(torch.nan)
    engine.weights_loaded()
    engine.add(requests[0])
    with pytest.raises(NonFiniteLogits) as caught:
        engine.step()
    assert caught.value.request_ids == (requests[0].request_id,)
    assert engine.pending == 1 and engine.abort(requests[0].request_id)
    for name, tensor in engine.weights().items():
        tensor.copy_(good[name])
    engine.weights_loaded()
    assert _run(engine, requests) == expected


def test_weights_that_break_while_decoding_leave_the_requests_to_be_aborted() -> None:
    engine = _engine()
    engine.add(EngineRequest("a", (1, 2), 0, 1.0, 30))
    engine.step()
    engine.weights()["lm_head.weight"].fill_(torch.nan)
    for _ in range(2):
        with pytest.raises(NonFiniteLogits):
            engine.step()
    assert engine.abort("a") and not engine.pending


def test_a_result_survives_the_failure_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine()
    engine.add(EngineRequest("long", (1, 2), 0, 1.0, 30))
    engine.step()
    engine.add(EngineRequest("short", (1, 2), 0, 1.0, 1))
    decode = engine._forward.decode
    monkeypatch.setattr(engine._forward, "decode", lambda *args: decode(*args) * torch.nan)
    with pytest.raises(NonFiniteLogits, match="long"):
        engine.step()
    assert engine.pending == 2 and engine.abort("long") and engine.pending == 1
    assert [result.request_id for result in engine.step()] == ["short"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "sliding_attention"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding window of 8"),
        ({"model_type": "stablelm"}, "its own attention code"),
    ],
)
def test_other_architectures_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    config = _config("qwen3-grouped") | {"use_sliding_window": True} | changes
    model = empty_model(ModelConfig(config=config, tokenizer="none"))
    with pytest.raises(UnsupportedModel, match=named):
        TransformersEngine(model, [], max_batch=2, max_context=64)


def test_a_context_beyond_the_positions_of_the_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="256 positions"):
        TransformersEngine(_model(), [], max_batch=2, max_context=257)


def _longrope(original: int) -> ModelConfig:
    factors = {
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "rope_type": "longrope",
        "rope_theta": 1e4,
    }
    config = SIZES | {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = factors | {"original_max_position_embeddings": original}
    return ModelConfig(
        config=config | {"original_max_position_embeddings": original, "rope_parameters": rope},
        tokenizer="none",
    )


def test_longrope_is_refused_across_its_switch_and_right_before_it() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"change behind 24 tokens.*set engine.max_context to 24 or less"
    ):
        TransformersEngine(empty_model(_longrope(24)), [], max_batch=2, max_context=25)
    torch.manual_seed(0)
    model, plain = (load_model(_longrope(24), torch.float32) for _ in range(2))
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            ours.copy_(theirs.mul_(4) if theirs.ndim > 1 else theirs)
    engine = TransformersEngine(model.requires_grad_(False), [], max_batch=2, max_context=24)
    requests = [EngineRequest(str(n), (1, 2, 3) * n, n, 1.0, 24 - 3 * n) for n in (1, 4)]
    results = _run(engine, requests)
    for request in requests:
        row = torch.tensor([[*request.prompt_tokens, *results[request.request_id].tokens]])
        assert row.shape[1] == 24
        logprobs = plain(input_ids=row).logits[0].log_softmax(-1)
        expected = [
            logprobs[position - 1, row[0, position]].item()
            for position in range(len(request.prompt_tokens), 24)
        ]
        assert results[request.request_id].logprobs == pytest.approx(expected, abs=1e-4)


def test_a_mixture_whose_config_asks_for_router_losses_generates() -> None:
    mixture = {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "output_router_logits": True, **_heads(4, 2, 8),
    }  # fmt: skip
    model = load_model(ModelConfig(config=SIZES | mixture, tokenizer="none"), torch.float32)
    engine = TransformersEngine(model.requires_grad_(False), [], max_batch=2, max_context=64)
    results = _run(engine, [EngineRequest(str(n), (1,) * (n + 1), n, 1.0, 5) for n in range(3)])
    assert all(len(result.tokens) == 5 for result in results.values())


def test_bfloat16_generates() -> None:
    config = ModelConfig(config=_config("qwen3-grouped"), tokenizer="none", dtype="bfloat16")
    engine = TransformersEngine(empty_model(config), [], max_batch=4, max_context=64)
    source = _model().state_dict()
    for name, tensor in engine.weights().items():
        assert tensor.dtype == torch.bfloat16
        tensor.copy_(source[name])
    engine.weights_loaded()
    results = _run(engine, [EngineRequest(str(i), (1,) * (i + 1), i, 1.0, 20) for i in range(6)])
    assert all(len(result.tokens) == 20 for result in results.values())


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.booleans()), max_size=6), max_size=12
    )
)
def test_every_request_comes_back_exactly_once(schedule: list[list[tuple[int, int, bool]]]) -> None:
    """``schedule``: per step the arrivals as (prompt length, tokens wanted, whether to abort it after)."""
    engine = _engine(stops=[EOS], max_batch=4)
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
    returned += _drain(engine)
    assert sorted(returned) == sorted(owed)
    assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)
