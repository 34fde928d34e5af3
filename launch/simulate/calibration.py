"""The numbers of a device from what a run has measured. Pure.

Each measured time is a number of calls and amounts of work by the rooflines' own counting. The costs of all these are
fitted to the steps and policies of the run (``least_squares.py``). A run does not measure peaks, so that a rate is
written as a peak of which all is achieved, and others as shares of it.

    prefill                  less reading b P bytes in each chunk: chunks; 2 P operations for each computed token
    decode                   steps; b P bytes read in each, or the products of its tokens if they take longer
    forward and backward     forwards; L H elements a token; 6 P operations a token, 8 P with checkpoints, also of the
                             spare tokens
    optimizer                steps; 28 P / R bytes
    bytes to the device      of new weights, b P, in the copies of their installs

Calls, elements and operations are distinct only if their ratios differ between steps or policies, as they do for
models of two sizes, or batches of two. Else they are counted as operations, and a prediction for another size or batch
is wrong by as much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from ...actors.model_shape import ModelShape
from .devices import DeviceConfig
from .least_squares import fit_costs
from .roofline import SPARE_TOKENS

_TERA: Final = 1e12
_GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class Work:
    """A measured time of a policy in a step, or the sum over several. ``calls``: chunks of prompts, decode steps or
    forwards of a rank. ``tokens``: of them all."""

    calls: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy's times in the steps of a run; empty or 0: not measured.

    ``ranks``, ``item_bytes``, ``checkpoints``: of its trainer. ``devices``: of an instance. ``prefill``, ``decode``,
    ``training``: a ``Work`` for each step; the tokens of training have their prompts, and lack those that were not
    computed. ``optimizer_s``: the shortest optimizer step. ``versions``: copies of weights to an instance."""

    shape: ModelShape
    ranks: int
    devices: int
    item_bytes: int
    checkpoints: bool
    prefill: tuple[Work, ...] = ()
    decode: tuple[Work, ...] = ()
    training: tuple[Work, ...] = ()
    optimizer_s: float = 0.0
    versions: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """``device``: the description. ``sources``: of each of its numbers that is measured, in words."""

    device: DeviceConfig
    sources: Mapping[str, str]


Amounts = Callable[[Measured, Work], float]


@dataclass(slots=True)
class _Numbers:
    """``base``: its numbers stand where a run has measured none. ``sources``: of those that it has measured."""

    base: DeviceConfig
    changes: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> DeviceConfig:
        return self.base.model_copy(update=self.changes)

    def set_number(self, key: str, value: float | None, source: str) -> None:
        if value is not None:
            self.changes[key], self.sources[key] = value, source

    def set_rates(self, peak_key: str, unit: float, rates: Sequence[tuple[str, float | None, str]]) -> None:
        """A rate that was not measured stays that of the base: its share is of another peak then."""
        before = getattr(self.base, peak_key) * unit
        if peak := max((rate for _, rate, _ in rates if rate), default=0.0):
            sources = " and ".join(source for _, rate, source in rates if rate)
            self.set_number(peak_key, peak / unit, sources)
            for key, rate, source in rates:
                if rate:
                    self.set_number(key, rate / peak, source)
                else:
                    self.changes[key] = min(1.0, before * getattr(self.base, key) / peak)


def calibrate(policies: Sequence[Measured], base: DeviceConfig) -> Calibration:
    """``policies``: of one run, or of several on the same machine. ``base``: has the numbers that they have not
    measured."""
    numbers = _Numbers(base)
    training = _costs(
        _works(policies, "training"), {"call": _calls, "element": _elements, "work": _training_operations}
    )
    updates = _costs(
        [(policy, Work(1, 0, policy.optimizer_s)) for policy in policies],
        {"call": _calls, "work": _update_bytes},
    )
    # Without two sizes of models the reading is part of the step: its rate is taken from the optimizer step.
    decode = _costs(_works(policies, "decode"), {"call": _calls, "work": _read_bytes})
    read_rate = _rate(decode) if "call" in decode else None
    reading = "decode steps" if read_rate else "the optimizer step"
    numbers.set_rates(
        "memory_gb_s",
        _GIGA,
        [
            ("memory_share", read_rate or _rate(updates), reading),
            ("update_share", _rate(updates), "the optimizer step"),
        ],
    )
    prefill = _costs(_beside_reading(policies, numbers.device), {"call": _calls, "work": _prefill_operations})
    numbers.set_rates(
        "tflops",
        _TERA,
        [
            ("product_share", _rate(prefill), "prefill"),
            ("training_share", _rate(training), "forward and backward"),
        ],
    )
    numbers.set_number("prompts_s", prefill.get("call"), "prefill, less reading and products")
    numbers.set_number("forward_s", training.get("call"), "forward and backward, less their products")
    numbers.set_number("element_s", training.get("element"), "forward and backward, less their products")
    numbers.set_number("update_s", updates.get("call"), "the optimizer step, less its memory")
    copied = sum(policy.item_bytes * policy.shape.parameters * policy.versions for policy in policies)
    copying_s = sum(policy.transfer_s for policy in policies)
    if copied and copying_s:
        numbers.set_number("host_gb_s", copied / copying_s / _GIGA, "copies of new weights")
    numbers.set_number("step_s", _step_s(policies, numbers.device), "decode steps, less reading and products")
    return Calibration(numbers.device, numbers.sources)


def _calls(_: Measured, work: Work) -> float:
    return work.calls


def _elements(policy: Measured, work: Work) -> float:
    return policy.shape.layers * policy.shape.hidden * work.tokens / policy.ranks


def _prefill_operations(policy: Measured, work: Work) -> float:
    return 2.0 * policy.shape.parameters * work.tokens / policy.devices


def _training_operations(policy: Measured, work: Work) -> float:
    passes = 4 if policy.checkpoints else 3
    tokens = work.tokens / policy.ranks + SPARE_TOKENS * work.calls
    return 2.0 * passes * policy.shape.parameters * tokens


def _read_bytes(policy: Measured, work: Work) -> float:
    return policy.shape.parameters * policy.item_bytes / policy.devices * work.calls


def _update_bytes(policy: Measured, work: Work) -> float:
    return 28.0 * policy.shape.parameters / policy.ranks * work.calls


def _read_s(policy: Measured, device: DeviceConfig) -> float:
    """Seconds in which an engine reads all weights."""
    read_rate = device.memory_gb_s * _GIGA * device.memory_share
    return policy.shape.parameters * policy.item_bytes / policy.devices / read_rate


def _token_s(policy: Measured, device: DeviceConfig) -> float:
    """Seconds in which an engine computes the products of a token."""
    return 2 * policy.shape.parameters / policy.devices / (device.tflops * _TERA * device.product_share)


def _beside_reading(policies: Sequence[Measured], device: DeviceConfig) -> list[tuple[Measured, Work]]:
    """Prefill without the time in which its chunks read the weights."""
    return [
        (policy, replace(work, seconds=work.seconds - work.calls * _read_s(policy, device)))
        for policy, work in _works(policies, "prefill")
    ]


def _works(policies: Sequence[Measured], field: str) -> list[tuple[Measured, Work]]:
    return [(policy, work) for policy in policies for work in getattr(policy, field)]


def _costs(works: Sequence[tuple[Measured, Work]], amounts: Mapping[str, Amounts]) -> dict[str, float]:
    """Seconds of each unit of the kinds of work that are distinct; none if nothing was measured. ``amounts``: of
    each kind, the last of which is always there."""
    present = [(policy, work) for policy, work in works if min(work.seconds, work.calls) > 0]
    rows = [[amount(policy, work) for amount in amounts.values()] for policy, work in present]
    if not rows or not any(row[-1] for row in rows):
        return {}
    return fit_costs([*amounts], rows, [work.seconds for _, work in present])


def _rate(costs: Mapping[str, float]) -> float | None:
    """Units of the work in a second; None: not measured."""
    return 1.0 / costs["work"] if costs.get("work") else None


def _step_s(policies: Sequence[Measured], device: DeviceConfig) -> float | None:
    """Seconds of an engine's step beside its products: the median of all measurements, as some of them have waited for
    something else."""
    beside_s = [
        (work.seconds - max(_read_s(policy, device) * work.calls, _token_s(policy, device) * work.tokens))
        / work.calls
        for policy, work in _works(policies, "decode")
        if work.calls > 0
    ]
    return max(0.0, median(beside_s)) if beside_s else None
