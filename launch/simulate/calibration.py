"""The numbers of a device from what a run has measured. Pure.

Each number is the work of a policy by the rooflines' own counting, divided by the measured seconds: a simulation with
it takes these seconds again. A run does not measure peaks, so that a rate is written as a peak of
which all is achieved, and training as a share of it.

    operations a second      2 P for each token of the prompts, in prefill; of training 6 P, 8 P with checkpoints, also
                             for the spare tokens of each forward
    a step of the engine     mean decode step, less its products with the weights or reading them
    bytes a second           of the memory: 28 P / R in an optimizer step
    bytes to the device      of new weights, b P, in the copies of their installs
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...actors.model_shape import ModelShape
from .devices import DeviceConfig
from .roofline import SPARE_TOKENS

_TERA: Final = 1e12
_GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class Measured:
    """Sums of a policy over the steps of a run; 0 seconds: not measured.

    ``ranks``, ``item_bytes``, ``checkpoints``: of its trainer. ``devices``: of an instance. ``trained_tokens``: with
    prompts, without those that were not computed. ``forwards``: of each rank. ``optimizer_s``: the shortest
    optimizer step. ``versions``: copies of weights to an instance."""

    shape: ModelShape
    ranks: int
    devices: int
    item_bytes: int
    checkpoints: bool
    prompt_tokens: float = 0.0
    prefill_s: float = 0.0
    decode_steps: float = 0.0
    decoded_tokens: float = 0.0
    decode_s: float = 0.0
    trained_tokens: float = 0.0
    forwards: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    versions: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """``device``: the description. ``sources``: of each of its numbers that is measured, in words."""

    device: DeviceConfig
    sources: Mapping[str, str]


def calibrate(policies: Sequence[Measured], base: DeviceConfig) -> Calibration:
    """``base``: its numbers stand where the run has measured none."""
    changes: dict[str, float] = {}
    sources: dict[str, str] = {}

    def set_number(key: str, value: float, source: str) -> None:
        changes[key], sources[key] = value, source

    products = _rate(
        (2.0 * policy.shape.parameters * policy.prompt_tokens / policy.devices, policy.prefill_s)
        for policy in policies
    )
    training = _rate(
        (
            2.0
            * _passes(policy)
            * policy.shape.parameters
            * (policy.trained_tokens / policy.ranks + SPARE_TOKENS * policy.forwards),
            policy.backward_s,
        )
        for policy in policies
    )
    if products or training:
        peak = max(products, training)
        set_number("tflops", peak / _TERA, "the faster of the next two")
        # A rate that was not measured stays that of the base: its share is of another peak then.
        for key, rate, source in (
            ("product_share", products, "prefill"),
            ("training_share", training, "forward and backward"),
        ):
            if rate:
                set_number(key, rate / peak, source)
            else:
                changes[key] = min(1.0, base.tflops * _TERA * getattr(base, key) / peak)
    # The fastest, not the mean: of policies that share a process, most steps wait for another's computation.
    memory = max(
        (
            28.0 * policy.shape.parameters / policy.ranks / policy.optimizer_s
            for policy in policies
            if policy.optimizer_s > 0
        ),
        default=0.0,
    )
    if memory:
        set_number("memory_gb_s", memory / _GIGA, "the optimizer step")
        set_number("memory_share", 1.0, "the optimizer step")
    copies = _rate(
        (policy.item_bytes * policy.shape.parameters * policy.versions, policy.transfer_s)
        for policy in policies
    )
    if copies:
        set_number("host_gb_s", copies / _GIGA, "copies of new weights")
    if (step_s := _step_s(policies, base.model_copy(update=changes))) is not None:
        set_number("step_s", step_s, "decode steps, less the products of their tokens")
    return Calibration(base.model_copy(update=changes), sources)


def _passes(policy: Measured) -> int:
    return 4 if policy.checkpoints else 3


def _rate(works: Iterable[tuple[float, float]]) -> float:
    """The whole work by the whole time of the policies that have both; 0 without any."""
    both = [(work, seconds) for work, seconds in works if work > 0 and seconds > 0]
    return sum(work for work, _ in both) / sum(seconds for _, seconds in both) if both else 0.0


def _step_s(policies: Sequence[Measured], device: DeviceConfig) -> float | None:
    """Seconds of an engine's step beside its products, the mean over all decode steps."""
    steps = sum(policy.decode_steps for policy in policies)
    if steps <= 0:
        return None
    beside_s = 0.0
    for policy in policies:
        if policy.decode_steps > 0:
            token_s = (
                2 * policy.shape.parameters / (device.tflops * _TERA * device.product_share * policy.devices)
            )
            read_s = (
                policy.shape.parameters
                * policy.item_bytes
                / (device.memory_gb_s * _GIGA * device.memory_share)
            )
            products_s = max(read_s / policy.devices * policy.decode_steps, token_s * policy.decoded_tokens)
            beside_s += policy.decode_s - products_s
    return max(0.0, beside_s / steps)
