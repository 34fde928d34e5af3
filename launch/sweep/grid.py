"""The runs of a sweep: every combination of the values of its settings."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...actors.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SweptRun:
    """``settings``: ``key.key=value`` each, those that all runs share too."""

    name: str
    settings: tuple[str, ...]


def runs_of(name: str, settings: Sequence[str]) -> list[SweptRun]:
    """A run for each combination of the values, the last setting changing first. ``settings``: ``key.key=value``, or
    ``key.key=value,value,...``; a comma within brackets or quotes divides nothing.

    A run is named after the sweep ``name`` and its own values, as ``first-seed=1-lr=1e-5``: by the last part of each
    key, or by more parts of it if two end alike. Raises ConfigError for a value that is missing or there twice."""
    choices = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        values = _values(text)
        if len(values) > 1 and (not all(values) or len(set(values)) < len(values)):
            raise ConfigError(f"{setting}: each value once, and none empty")
        if key in choices:
            raise ConfigError(f"{key} is there twice: give all its values at once, as {key}=1,2")
        choices[key] = values
    words = _short_names([key for key, values in choices.items() if len(values) > 1])
    runs = []
    for combination in itertools.product(*choices.values()):
        chosen = dict(zip(choices, combination, strict=True))
        parts = [name, *(f"{words[key]}={_plain(chosen[key])}" for key in words)]
        runs.append(SweptRun("-".join(parts), tuple(f"{key}={value}" for key, value in chosen.items())))
    (name, count), *_ = Counter(run.name for run in runs).most_common(1)
    if count > 1:
        raise ConfigError(f"two runs would be named {name}: their values differ in signs alone")
    return runs


def _values(text: str) -> list[str]:
    depth, quote, values = 0, "", [""]
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += sign
    return values


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """For each key the fewest of its last parts that no other key ends with."""
    words = {}
    for key in keys:
        parts = key.split(".")
        endings = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        # A whole key may be the end of another one, which has more parts then.
        words[key] = next((ending for ending in endings if _count_ending(keys, ending) == 1), key)
    return words


def _count_ending(keys: Sequence[str], ending: str) -> int:
    return sum(f".{key}".endswith(f".{ending}") for key in keys)


def _plain(value: str) -> str:
    """The value as a part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", value).strip("_")
