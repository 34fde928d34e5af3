"""The numbers of a device from what a run has measured. Pure.

Each measured time is a number of calls and amounts of work by the rooflines' own counting. The costs of all these are
fitted to the steps and policies of the run (``least_squares.py``). A run does not measure peaks, so that a rate is
written as a peak of which all is achieved, and others as shares of it.

    prefill                  chunks; 2 P operations for each token of the prompts
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
from dataclasses import dataclass
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


def calibrate(policies: Sequence[Measured], base: DeviceConfig) -> Calibration:
    """``base``: its numbers stand where the run has measured none."""
    changes: dict[str, float] = {}
    sources: dict[str, str] = {}

    def set_number(key: str, value: float | None, source: str) -> None:
        if value is not None:
            changes[key], sources[key] = value, source

    def set_rates(peak_key: str, unit: float, rates: Sequence[tuple[str, float | None, str]]) -> None:
        """A rate that was not measured stays that of the base: its share is of another peak then."""
        before = getattr(base, peak_key) * unit
        if peak := max((rate for _, rate, _ in rates if rate), default=0.0):
            set_number(peak_key, peak / unit, " and ".join(source for _, rate, source in rates if rate))
            for key, rate, source in rates:
                if rate:
                    set_number(key, rate / peak, source)
                else:
                    changes[key] = min(1.0, before * getattr(base, key) / peak)

    prefill = _costs(_works(policies, "prefill"), {"call": _calls, "work": _prefill_operations})
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
    set_rates(
        "tflops",
        _TERA,
        [
            ("product_share", _rate(prefill), "prefill"),
            ("training_share", _rate(training), "forward and backward"),
        ],
    )
    set_rates(
        "memory_gb_s",
        _GIGA,
        [
            (
                "memory_share",
                read_rate or _rate(updates),
                "decode steps" if read_rate else "the optimizer step",
            ),
            ("update_share", _rate(updates), "the optimizer step"),
        ],
    )
    set_number("prompts_s", prefill.get("call"), "prefill, less its products")
    set_number("forward_s", training.get("call"), "forward and backward, less their products")
    set_number("element_s", training.get("element"), "forward and backward, less their products")
    set_number("update_s", updates.get("call"), "the optimizer step, less its memory")
    copied = sum(policy.item_bytes * policy.shape.parameters * policy.versions for policy in policies)
    copying_s = sum(policy.transfer_s for policy in policies)
    if copied and copying_s:
        set_number("host_gb_s", copied / copying_s / _GIGA, "copies of new weights")
    step_s = _step_s(policies, base.model_copy(update=changes))
    set_number("step_s", step_s, "decode steps, less reading and products")
    return Calibration(base.model_copy(update=changes), sources)


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
    """Seconds of an engine's step beside its products, the mean over all decode steps."""
    steps = sum(work.calls for policy in policies for work in policy.decode)
    if steps <= 0:
        return None
    beside_s = 0.0
    for policy in policies:
        parameters = policy.shape.parameters / policy.devices
        token_s = 2 * parameters / (device.tflops * _TERA * device.product_share)
        read_s = parameters * policy.item_bytes / (device.memory_gb_s * _GIGA * device.memory_share)
        beside_s += sum(
            work.seconds - max(read_s * work.calls, token_s * work.tokens) for work in policy.decode
        )
    return max(0.0, beside_s / steps)
