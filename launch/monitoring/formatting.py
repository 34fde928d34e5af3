"""Checks and formats numbers and times."""

import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

OF_REWARDS: Final = ("reward/", "turn_reward/")
"""The beginnings of the names of an evaluation's metrics that are rewards, and not the workflow's own metrics."""


def number(value: Any) -> float | None:
    """``value`` if it is a number that can be drawn (finite, not a bool, below 1e300), else None."""
    if type(value) in (float, int) and -1e300 < value < 1e300:
        return float(value)
    return None


def compact(value: float) -> str:
    """Three significant digits with k, M or G: 14400 -> ``14.4k``, 0.0123 -> ``0.0123``."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return f"{float(f'{value / unit:.3g}'):g}{suffix}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as ``0.012 s``, ``35.1 s``, ``2 min 05 s`` or ``3 h 07 min``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def count(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def format_numbers(numbers: Sequence[int]) -> str:
    """The first three numbers and the count of the others: ``1, 2, 3 and 4 more``."""
    shown = ", ".join(map(str, numbers[:3]))
    return f"{shown} and {len(numbers) - 3} more" if len(numbers) > 3 else shown


def change(before: float, after: float, form: str) -> str:
    """``rose from 0.8% to 99.6%``, ``fell from ...``, or ``stayed at 0.8%`` if both read the same."""
    first, last = format(before, form), format(after, form)
    if first == last:
        return f"stayed at {last}"
    return f"{'rose' if after > before else 'fell'} from {first} to {last}"


def clock(unix_seconds: Any) -> str:
    """Unix seconds as UTC; empty if the time is missing or impossible."""
    try:
        return f"{datetime.fromtimestamp(unix_seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def words_wrapped(text: str, width: int) -> str:
    """``text`` with lines of at most ``width`` columns, broken between words and indented as they were. A word that is
    longer stays whole: it may be a path."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        ) or [""]
    return "\n".join(lines)
