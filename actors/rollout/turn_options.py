"""The arguments of one ``Agent.generate``, checked, with the agent's sampling in place of those that are missing.
Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, Final

from ...core.base.texts import guess
from ..environments.tool_calls import ToolOrSchema
from ..messages import Truncation
from .rollout_config import SamplingConfig, TurnSampling

_SEEDS: Final = range(-(2**63), 2**64)
_LEAST_INTEGERS: Final = {"max_new_tokens": 1, "top_k": 0}


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """See ``Agent.generate``; None: as the agent's sampling says."""

    tools: Sequence[ToolOrSchema] = ()
    stop: str | Sequence[str] | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    schema: Mapping[str, Any] | None = None
    must_call: bool | str = False
    retokenize: bool = False


NO_OPTIONS: Final = TurnOptions()
_NAMES: Final = tuple(field.name for field in fields(TurnOptions))


def turn_options(options: Mapping[str, Any]) -> TurnOptions:
    """Raises ValueError for an argument that ``Agent.generate`` lacks."""
    if unknown := [name for name in options if name not in _NAMES]:
        raise ValueError(
            f"generate has no argument {unknown[0]!r}; it has: {', '.join((*_NAMES, 'on_text'))}"
            f"{guess(unknown[0], _NAMES)}"
        )
    return TurnOptions(**options)


def turn_sampling(
    config: SamplingConfig, options: TurnOptions, evaluated_at: float | None, is_evaluation: bool
) -> TurnSampling:
    """``evaluated_at``: the temperature of all turns of an evaluation, which precedes all others; None without one.

    Raises ValueError, which names the argument.
    """
    if options is NO_OPTIONS:
        return config.defaults if evaluated_at is None else replace(config.defaults, temperature=evaluated_at)
    numbers = _numbers(options)
    if options.seed is not None and not (_is_int(options.seed) and options.seed in _SEEDS):
        raise ValueError(f"seed is {options.seed!r}, needs an integer of 64 bits")
    max_new_tokens = numbers.get("max_new_tokens", config.max_new_tokens)
    if max_new_tokens > config.max_new_tokens:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, more than the agent's sampling.max_new_tokens of "
            f"{config.max_new_tokens}"
        )
    if numbers.get("temperature") == 0 and not is_evaluation:
        raise ValueError("temperature is 0 in a training step: a greedy turn has nothing to learn from")
    temperature = numbers.get("temperature", config.temperature) if evaluated_at is None else evaluated_at
    cuts = {name: numbers[name] for name in ("top_k", "top_p", "min_p") if name in numbers}
    truncation = replace(config.defaults.truncation or Truncation(), **cuts)
    if (problem := truncation.problem()) is not None:
        raise ValueError(problem)
    return TurnSampling(
        temperature,
        max_new_tokens,
        None if truncation.leaves_all else truncation,
        config.stop if options.stop is None else _stops(options.stop),
        options.seed,
    )


def _numbers(options: TurnOptions) -> dict[str, Any]:
    """The numbers among the arguments. Raises ValueError for one that is of a wrong type or negative."""
    numbers: dict[str, Any] = {}
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p"):
        if (value := getattr(options, name)) is None:
            continue
        if (least := _LEAST_INTEGERS.get(name)) is not None:
            if not _is_int(value) or value < least:
                raise ValueError(f"{name} is {value!r}, needs an integer of at least {least}")
            numbers[name] = value
        elif isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, needs a finite number")
        else:
            numbers[name] = float(value)
    if numbers.get("temperature", 0) < 0:
        raise ValueError(f"temperature is {numbers['temperature']:g}, needs at least 0")
    return numbers


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop has {text!r}, needs strings that are not empty")
    return stops


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
