"""A model of 7B shape trains at 40 % of the card's peak rate: seconds and memory of a layer and of the head.

Models with few layers of that shape are trained on forwards of the default size, ``tokens_per_forward``; the difference
between two of them is that of their layers, the rest is the head, the embedding and the loss. Criteria: the rate of 28
layers that this gives, in the best setting; with activation checkpointing a layer keeps its input and little else.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.padding import PaddedRows, pad_rows

from .checks import Card, Check, at_least, at_most, part
from .filled_policies import filled_policy
from .models import SEVEN_BILLION, TINY, Shape, make_samples, peak_flops, setup_of
from .timing import free_memory, live_bytes, peak_bytes, seconds_of

_LEAST_MFU = 0.40
_MOST_KEPT = 1.2
_PROMPT, _COMPLETION = 256, 768
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """Forwards of ``rows`` samples of ``prompt`` and ``completion`` tokens, ``forwards`` in a micro-batch."""

    rows: int
    prompt: int
    completion: int
    forwards: int

    @property
    def tokens_per_forward(self) -> int:
        return self.rows * (self.prompt + self.completion)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a model's forward, of forward and backward, of a micro-batch, and of an optimizer step.
    ``kept``: bytes beyond those at rest after a forward, ``peak``: the most in a micro-batch; 0 on a CPU."""

    forward_s: float
    both_s: float
    batch_s: float
    kept: int
    peak: int
    step_s: float


def run(card: Card) -> Iterator[Check]:
    tokens = TorchTrainerConfig().tokens_per_forward
    card.need_memory(60e9)
    shape, few, many = (SEVEN_BILLION, 1, 4) if card.is_cuda else (TINY, 1, 2)
    load = (
        Load(tokens // (_PROMPT + _COMPLETION), _PROMPT, _COMPLETION, 2)
        if card.is_cuda
        else Load(2, 4, 12, 2)
    )
    shares: list[float] = []
    for checkpointing in (True, False):
        name = "checkpointing" if checkpointing else "all kept"
        yield from part(
            name, functools.partial(measure_layers, card, shape, (few, many), load, checkpointing, shares)
        )
        free_memory(card.device)
    if card.is_cuda:
        yield at_least(
            f"{shape.layers} layers, best: share of the peak rate", max(shares, default=0.0), _LEAST_MFU
        )


def measure_layers(
    card: Card, shape: Shape, layers: tuple[int, int], load: Load, checkpointing: bool, shares: list[float]
) -> Iterator[Check]:
    """The costs of a layer and of the rest, and of all layers of ``shape``; adds its share of the peak to ``shares``.
    ``layers``: of the two models."""
    few = _measure(card, shape.with_layers(layers[0]), load, checkpointing)
    free_memory(card.device)
    many = _measure(card, shape.with_layers(layers[1]), load, checkpointing)
    name = "checkpointing" if checkpointing else "all kept"
    between = layers[1] - layers[0]

    def of_layer(field: str) -> float:
        return float(getattr(many, field) - getattr(few, field)) / between

    def of_all(field: str) -> float:
        return float(getattr(many, field)) + (shape.layers - layers[1]) * of_layer(field)

    tokens = load.tokens_per_forward
    yield Check(f"{name}: ms of a layer's forward, {tokens} tokens", 1e3 * of_layer("forward_s"))
    yield Check(f"{name}: ms of its backward", 1e3 * (of_layer("both_s") - of_layer("forward_s")))
    head_s = [few.forward_s - layers[0] * of_layer("forward_s"), few.both_s - layers[0] * of_layer("both_s")]
    yield Check(f"{name}: ms of the head's forward", 1e3 * head_s[0])
    yield Check(f"{name}: ms of its backward, with a chunk's second forward", 1e3 * (head_s[1] - head_s[0]))
    yield Check(
        f"{name}: ms of an optimizer step for 1e9 parameters",
        1e12 * many.step_s / _parameters(shape, layers[1]),
    )
    samples = load.rows * load.forwards
    yield Check(f"{name}: {layers[1]} layers: tokens/s", tokens * load.forwards / many.batch_s)
    if not card.is_cuda:
        return
    yield Check(f"{name}: memory that a layer keeps for the backward", of_layer("kept"), "bytes")
    if checkpointing:
        residual = 4 * shape.hidden * load.rows * (load.prompt + load.completion - 1)
        yield at_most(f"{name}: the same over its input in float32", of_layer("kept") / residual, _MOST_KEPT)
    yield Check(f"{name}: {layers[1]} layers: peak memory", many.peak, "bytes")
    yield Check(f"{name}: {shape.layers} layers: peak memory, by these", of_all("peak"), "bytes")
    yield Check(
        f"{name}: {shape.layers} layers: tokens/s, by these", tokens * load.forwards / of_all("batch_s")
    )
    peak = peak_flops(torch.cuda.get_device_name(card.device))
    if peak is None:
        yield Check(f"{name}: share of the peak rate", "the peak rate of this card is unknown here")
        return
    for shown, seconds in ((layers[1], many.batch_s), (shape.layers, of_all("batch_s"))):
        operations = samples * shape.with_layers(shown).training_flops(load.prompt, load.completion)
        yield Check(f"{name}: {shown} layers: share of the peak rate", operations / seconds / peak)
    shares.append(operations / seconds / peak)


def _parameters(shape: Shape, layers: int) -> int:
    return shape.with_layers(layers).parameters


def _measure(card: Card, shape: Shape, load: Load, checkpointing: bool) -> Costs:
    setup = setup_of(
        shape,
        card.device,
        "bfloat16",
        tokens_per_forward=load.tokens_per_forward,
        checkpointing=checkpointing,
    )
    policy = filled_policy(setup)
    samples = make_samples(load.rows * load.forwards, load.prompt, load.completion, shape.vocabulary)
    policy.accumulate(samples[: load.rows])  # warm-up
    policy.optimizer_step()
    samples = [replace(sample, policy_version=1) for sample in samples]
    rows = pad_rows(
        [(sample.prompt_tokens, sample.tokens) for sample in samples[: load.rows]], shape.vocabulary
    ).with_tensors(lambda tensor: tensor.to(card.device))
    at_rest = live_bytes(card.device)
    logprobs = policy.models.completions.logprobs(rows)
    kept = live_bytes(card.device) - at_rest
    del logprobs
    return Costs(
        forward_s=seconds_of(card.device, lambda: _forward(policy, rows), _ROUNDS),
        both_s=seconds_of(
            card.device, lambda: torch.autograd.backward(_forward(policy, rows).sum()), _ROUNDS
        ),
        batch_s=seconds_of(card.device, lambda: policy.accumulate(samples), _ROUNDS),
        kept=kept,
        peak=peak_bytes(card.device, lambda: policy.accumulate(samples)),
        step_s=seconds_of(card.device, policy.optimizer_step),
    )


def _forward(policy: TorchPolicy, rows: PaddedRows) -> torch.Tensor:
    return policy.models.completions.logprobs(rows)
