"""A policy of 0.5B trains fast: its share of the card's peak rate, its memory, its waits for the device, its gradient.

Criteria: 25 % of the peak rate in the best setting; in a micro-batch the host waits for the device at most twice for
each forward; loss and gradient of a small model as in float64 on a CPU. The grid is recorded: activation checkpointing,
bf16 or float32, top-p. So are the operations that take most of the time, and the lines that wait.
"""

import copy
import random
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from flexmarl.actors.errors import TooManyTokens
from flexmarl.actors.messages import Sample
from flexmarl.actors.messages.truncation import Truncation
from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .checks import Card, Check, at_least, at_most, part
from .models import HALF_BILLION, TINY, Dtype, Shape, make_samples, peak_flops, setup_of
from .timing import free_memory, matmul_flops, peak_bytes, seconds_of

_LEAST_MFU = 0.25
_MOST_WAITS_PER_FORWARD = 2
_STEPS = 3
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Load:
    """Samples of a micro-batch: ``count``, of ``prompt`` and ``completion`` tokens each."""

    count: int
    prompt: int
    completion: int
    tokens_per_forward: int

    @property
    def forwards(self) -> int:
        return -(-self.count * (self.prompt + self.completion) // self.tokens_per_forward)


CARD_LOAD = Load(64, 256, 768, 16384)
CPU_LOAD = Load(4, 8, 24, 64)


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting of the grid. ``uneven``: the samples have 1/16 to all of the tokens of the load."""

    name: str
    dtype: Dtype = "bfloat16"
    checkpointing: bool = False
    truncation: Truncation | None = None
    uneven: bool = False
    packing: bool = True


GRID = (
    Variant("bf16"),
    Variant("bf16, checkpointing", checkpointing=True),
    Variant("bf16, checkpointing, top-p 0.9", checkpointing=True, truncation=Truncation(top_p=0.9)),
    Variant("float32, checkpointing", dtype="float32", checkpointing=True),
    Variant("bf16, padded, uneven lengths", uneven=True, packing=False),
    Variant("bf16, packed, uneven lengths", uneven=True),
)


def run(card: Card) -> Iterator[Check]:
    shape, load = (HALF_BILLION, CARD_LOAD) if card.is_cuda else (TINY, CPU_LOAD)
    yield from part("gradient", lambda: compare_gradients(card.device))
    yield from part("grid", lambda: measure_grid(card, shape, load))
    if card.is_cuda:
        yield from part("waits", lambda: record_waits(card, shape, load))


def measure_grid(card: Card, shape: Shape, load: Load) -> Iterator[Check]:
    """Tokens/s and memory of each variant; the share of the card's peak rate of the best one."""
    rates: dict[str, float] = {}
    for variant in GRID:
        yield from part(variant.name, lambda v=variant: _measure_variant(card, shape, load, v, rates))  # type: ignore[misc]
        free_memory(card.device)
    if card.is_cuda:
        even = [rates[variant.name] for variant in GRID if variant.name in rates and not variant.uneven]
        yield from _share_of_peak(card, shape, load, max(even, default=0.0))


def _measure_variant(
    card: Card, shape: Shape, load: Load, variant: Variant, rates: dict[str, float]
) -> Iterator[Check]:
    """Adds the variant's tokens/s to ``rates``."""
    try:
        rates[variant.name], peak = _measure(card, shape, load, variant)
    except (torch.OutOfMemoryError, TooManyTokens):
        yield Check(f"{variant.name}: tokens/s", "out of memory")
        return
    yield Check(f"{variant.name}: tokens/s", rates[variant.name])
    if card.is_cuda:
        yield Check(f"{variant.name}: peak memory", peak, "bytes")


def _measure(card: Card, shape: Shape, load: Load, variant: Variant) -> tuple[float, int]:
    """Tokens/s of the median step behind a first one, which compiles; uneven lengths differ from step to step."""
    policy = _policy(card, shape, load, variant)
    _train(policy, _samples(shape, load, variant))
    rates: list[float] = []

    def measure() -> None:
        for step in range(1, _STEPS + 1):
            samples = [
                replace(sample, policy_version=step) for sample in _samples(shape, load, variant, seed=step)
            ]
            tokens = sum(len(sample.prompt_tokens) + len(sample.tokens) for sample in samples)
            rates.append(tokens / seconds_of(card.device, partial(_train, policy, samples)))

    peak = peak_bytes(card.device, measure)
    return statistics.median(rates), peak


def _train(policy: TorchPolicy, samples: Sequence[Sample]) -> None:
    policy.accumulate(samples)
    policy.optimizer_step()


def _policy(card: Card, shape: Shape, load: Load, variant: Variant) -> TorchPolicy:
    setup = setup_of(
        shape, card.device, variant.dtype,
        tokens_per_forward=load.tokens_per_forward, checkpointing=variant.checkpointing,
        packing=variant.packing,
    )  # fmt: skip
    return _torch_policy(setup)


def _torch_policy(setup: PolicySetup) -> TorchPolicy:
    return TorchPolicy(PolicyName("battery"), setup, seed=0, total_steps=100)


def _samples(shape: Shape, load: Load, variant: Variant, seed: int = 0) -> list[Sample]:
    samples = make_samples(load.count, load.prompt, load.completion, shape.vocabulary)
    if variant.uneven:
        rng = random.Random(seed)
        tokens = load.prompt + load.completion
        samples = [_shorten(sample, rng.randint(max(2, tokens // 16), tokens)) for sample in samples]
    return [replace(sample, truncation=variant.truncation) for sample in samples]


def _shorten(sample: Sample, tokens: int) -> Sample:
    """The first ``tokens`` of ``sample``, at least 2, in prompt and completion as before."""
    prompt = max(1, tokens * len(sample.prompt_tokens) // (len(sample.prompt_tokens) + len(sample.tokens)))
    completion = tokens - prompt
    return replace(
        sample,
        prompt_tokens=sample.prompt_tokens[:prompt],
        tokens=sample.tokens[:completion],
        logprobs=sample.logprobs[:completion],
    )


def _share_of_peak(card: Card, shape: Shape, load: Load, tokens_s: float) -> Iterator[Check]:
    flops_token = shape.training_flops(load.prompt, load.completion) / (load.prompt + load.completion)
    reached = tokens_s * flops_token
    yield Check("best: TFLOP/s", reached / 1e12)
    yield Check("best: share of a bf16 product's rate", reached / matmul_flops(card.device, 8192))
    name = torch.cuda.get_device_name(card.device)
    peak = peak_flops(name)
    if peak is None:
        yield Check("best: share of the peak rate", f"the peak rate of {name} is unknown here")
    else:
        yield at_least("best: share of the peak rate", reached / peak, _LEAST_MFU)


# ----------------------------------------------------------------------- waits for the device


def record_waits(card: Card, shape: Shape, load: Load) -> Iterator[Check]:
    """The waits of the host for the device in one micro-batch, by the line that waits."""
    variant = GRID[1]
    policy = _policy(card, shape, load, variant)
    samples = _samples(shape, load, variant)
    policy.accumulate(samples[:1])
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            policy.accumulate(samples)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [wait for wait in waits if "synchronizing" in str(wait.message)]
    places = Counter(f"{_short(wait.filename)}:{wait.lineno}" for wait in waits)
    for place, count in places.most_common(20):
        yield Check(f"waits at {place}", count)
    forwards = load.forwards
    yield at_most("waits for each forward", len(waits) / forwards, _MOST_WAITS_PER_FORWARD)
    yield from part("operations", lambda: _longest_operations(policy, samples[: load.count // forwards]))


def _short(path: str) -> str:
    file = Path(path)
    return str(file.relative_to(_ROOT)) if file.is_relative_to(_ROOT) else "/".join(file.parts[-3:])


def _longest_operations(policy: TorchPolicy, samples: Sequence[Sample]) -> Iterator[Check]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        policy.accumulate(samples)
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: row.self_device_time_total, reverse=True)
    for row in rows[:20]:
        yield Check(f"device ms in {row.key[:60]}", row.self_device_time_total / 1000.0)


# ----------------------------------------------------------------------- the gradient


def compare_gradients(device: str) -> Iterator[Check]:
    """Loss and gradient of a model of two layers, in float32 and bf16, beside float64 on a CPU."""
    samples = make_samples(6, 5, 9, TINY.vocabulary)
    reference = _torch_policy(setup_of(TINY, "cpu", "float32"))
    weights = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    exact = _exact_gradients(reference, samples)
    bounds: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 3e-2}
    for dtype, bound in bounds.items():
        policy = _torch_policy(setup_of(TINY, device, dtype))
        policy.model.load_state_dict(weights)
        policy.accumulate(samples)
        errors = [
            ((parameter.grad.cpu().double() - exact[name]).norm(), exact[name].norm())
            for name, parameter in policy.model.named_parameters()
            if parameter.grad is not None
        ]
        error = sum(float(difference) ** 2 for difference, _ in errors) ** 0.5
        norm = sum(float(size) ** 2 for _, size in errors) ** 0.5
        yield at_most(f"{dtype}: error of the gradient", error / norm, bound)


def _exact_gradients(policy: TorchPolicy, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """In float64 on a CPU, by the same code, with PyTorch's own forward of the model."""
    policy.model.double()
    policy.accumulate(samples)
    return {
        name: copy.deepcopy(parameter.grad)
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }
