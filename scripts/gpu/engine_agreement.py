"""The embedded engine gives tokens the probabilities that the trainer computes, and decodes fast.

A model of 0.5B with random weights and logits that are sharpened to a likely spread, in bf16 and in float32: the engine
draws completions, the trainer computes their log-probabilities again. Criteria: the mean of ``|ratio - 1|`` over the
tokens, below 1e-4 in float32, and in bf16 below 0.05 and 1.5 times that of the trainer beside float32. Recorded: the
differences of log-probabilities, and the tokens that the engine decodes in a second at several batch sizes.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model
from flexmarl.actors.trainer.backends.torch_policy.completion_model import (
    CompletionModel,
    named_weights,
    placed_model,
)
from flexmarl.actors.trainer.padding import pad_rows

from .checks import Card, Check, at_most, part
from .filled_policies import fill
from .models import HALF_BILLION, TINY, Dtype, Shape, model_of
from .timing import free_memory

_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
_FLOAT32_BOUND = 1e-4
_BFLOAT16_BOUND = 1.5
"""Times the trainer's deviation from float32 with the same weights. Two computations in bf16 that round at other places
have each that deviation, and differ by the square root of two of it."""
_BFLOAT16_MOST = 0.05
"""At any deviation of the trainer's: a trainer that rounds more than any card does would else excuse the engine."""
_SPREAD = 2.0
"""Standard deviation of the logits: a new model's is about 0.6, so that all tokens are nearly alike. A trained model's
is larger, and in bf16 logits are rounded by up to 1/512 of their size: its deviation is larger, too."""


@dataclass(frozen=True, slots=True)
class Load:
    """``rows`` requests of ``prompt`` tokens, each for ``completion`` ones; then batches of ``batches`` rows."""

    rows: int
    prompt: int
    completion: int
    batches: tuple[int, ...]
    batch_tokens: int


CARD_LOAD = Load(32, 512, 512, (1, 16, 64), 128)
CPU_LOAD = Load(4, 8, 16, (1, 4), 8)


def run(card: Card) -> Iterator[Check]:
    shape, load = (HALF_BILLION, CARD_LOAD) if card.is_cuda else (TINY, CPU_LOAD)
    for dtype in _DTYPES:
        yield from part(dtype, partial(compare, card, shape, load, dtype))
        free_memory(card.device)


def compare(
    card: Card, shape: Shape, load: Load, dtype: Dtype, most: float = _BFLOAT16_MOST
) -> Iterator[Check]:
    """The engine's numbers beside the trainer's, then its speed. ``most``: of the mean of ``|ratio - 1|`` in bf16, at
    any deviation of the trainer's."""
    config = model_of(shape, card.device, dtype)
    trainer = CompletionModel(config, placed_model(config, None).requires_grad_(False))
    fill(trainer.model)
    sharpen(trainer, shape)
    trainer.narrow()
    engine = engine_of(config, trainer, load)
    results = generate(engine, _requests(shape, load.rows, load.prompt, load.completion))
    prompts = {
        request.request_id: request.prompt_tokens for request in _requests(shape, load.rows, load.prompt, 1)
    }
    differences = _differences(trainer, prompts, results)
    bound = _FLOAT32_BOUND
    if dtype == "bfloat16":
        exact = _in_float32(shape, card, trainer)
        of_engine = _differences(exact, prompts, results)
        deviation = _deviation(of_engine - differences)
        yield Check("bfloat16: mean of |ratio - 1|, trainer beside float32", deviation)
        yield Check("bfloat16: mean of |ratio - 1|, engine beside float32", _deviation(of_engine))
        bound = min(_BFLOAT16_BOUND * deviation, most)
        del exact
    yield from _distribution(dtype, differences, bound)
    for size in load.batches:
        yield from part(f"{dtype}, batch {size}", partial(_decode, engine, shape, load, dtype, size))


def sharpen(trainer: CompletionModel, shape: Shape) -> None:
    """Scales the last norm so that the logits spread as those of a trained model do."""
    rng = random.Random(1)
    row = tuple(rng.randrange(shape.vocabulary) for _ in range(32))
    with torch.no_grad():
        logits = trainer.model(
            input_ids=torch.tensor([row], device=trainer.model.device), use_cache=False
        ).logits
        trainer.model.base_model.norm.weight.mul_(_SPREAD / logits.float().std())


def engine_of(config: ModelConfig, trainer: CompletionModel, load: Load) -> TransformersEngine:
    """The embedded engine with the trainer's weights."""
    model = empty_model(config)
    context = load.prompt + max(load.completion, load.batch_tokens) + 1
    engine = TransformersEngine(
        model, (), max_batch=max(load.rows, *load.batches), max_context=context, kv_cache_bytes=8 << 30
    )
    weights = engine.weights()
    source = named_weights(trainer.model)
    for name, tensor in weights.items():
        tensor.copy_(source[name])
    engine.weights_loaded(weights)
    return engine


def _requests(shape: Shape, count: int, prompt: int, completion: int, first: int = 0) -> list[EngineRequest]:
    requests = []
    for number in range(first, first + count):
        rng = random.Random(number)
        tokens = tuple(rng.randrange(shape.vocabulary) for _ in range(prompt))
        requests.append(EngineRequest(f"r{number}", tokens, number, 1.0, completion))
    return requests


def generate(engine: TransformersEngine, requests: Sequence[EngineRequest]) -> dict[str, EngineResult]:
    """The results by request."""
    for request in requests:
        engine.add(request)
    results: dict[str, EngineResult] = {}
    while engine.pending:
        results |= {result.request_id: result for result in engine.step()}
    return results


def _in_float32(shape: Shape, card: Card, trainer: CompletionModel) -> CompletionModel:
    """A model that computes in float32 with the weights of ``trainer`` as bf16 rounds them."""
    config = model_of(shape, card.device, "float32")
    model = CompletionModel(config, placed_model(config, None).requires_grad_(False))
    source = named_weights(trainer.model)
    for name, tensor in named_weights(model.model).items():
        tensor.copy_(source[name].to(torch.bfloat16))
    return model


def _differences(
    trainer: CompletionModel, prompts: Mapping[str, tuple[int, ...]], results: Mapping[str, EngineResult]
) -> Tensor:
    return torch.cat([_difference(trainer, prompts[name], result) for name, result in results.items()])


def _deviation(differences: Tensor) -> float:
    return float((differences.exp() - 1).abs().mean())


@torch.no_grad()
def _difference(trainer: CompletionModel, prompt: tuple[int, ...], result: EngineResult) -> Tensor:
    """The trainer's log-probabilities less the engine's, float64 on the CPU."""
    device = trainer.model.device
    rows = pad_rows([(prompt, result.tokens)], trainer.vocab_size).with_tensors(
        lambda tensor: tensor.to(device)
    )
    computed = trainer.logprobs(rows).double().cpu()
    return computed - torch.tensor(result.logprobs, dtype=torch.float64)


def _distribution(dtype: Dtype, differences: Tensor, bound: float) -> Iterator[Check]:
    ratios = (differences.exp() - 1).abs()
    sizes = differences.abs()
    yield Check(f"{dtype}: tokens", len(differences))
    yield at_most(f"{dtype}: mean of |ratio - 1|", float(ratios.mean()), bound)
    yield Check(f"{dtype}: p99 of |ratio - 1|", float(ratios.quantile(0.99)))
    yield Check(f"{dtype}: greatest |ratio - 1|", float(ratios.max()))
    yield Check(f"{dtype}: mean difference of log-probabilities", float(differences.mean()))
    yield Check(f"{dtype}: median of its size", float(sizes.median()))
    yield Check(f"{dtype}: p99 of its size", float(sizes.quantile(0.99)))
    yield Check(f"{dtype}: greatest", float(sizes.max()))
    yield Check(f"{dtype}: share of tokens beyond 0.1", float((sizes > 0.1).double().mean()))


def _decode(engine: TransformersEngine, shape: Shape, load: Load, dtype: Dtype, size: int) -> Iterator[Check]:
    """Tokens that the decode steps of a batch give in a second, prompts not counted."""
    first = 1000 * size
    # Of the same lengths: for each length of the cache a first call loads kernels, and takes memory.
    generate(engine, _requests(shape, size, load.prompt, load.batch_tokens, first))
    before = engine.statistics()
    generate(engine, _requests(shape, size, load.prompt, load.batch_tokens, first + size))
    after = engine.statistics()
    tokens, seconds = after.decoded_tokens - before.decoded_tokens, after.decode_s - before.decode_s
    yield Check(f"{dtype}, batch {size}: tokens/s decoded", tokens / seconds)
