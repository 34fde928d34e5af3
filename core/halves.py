r"""Halves of surrogate pairs in texts. Python's and JSON's strings may hold one alone, ``\ud83d``; UTF-8, and so a
message, can't. A text that programs read is sent exactly or refused; one that people read may be escaped."""

from collections.abc import Callable
from typing import Any

_SHOWN = 80


def escaped(text: str) -> str:
    r"""``text``, for people, with ``\ud83d`` written out in place of a half."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def holds_half(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def half_problem(value: Any, to_plain: Callable[[Any], Any] = lambda value: None) -> str:
    r"""The first string in ``value`` that holds a half, with its place: ``data.notes[3] is 'a\ud83d': ...``. Empty if
    none does. Looks into lists, tuples, dictionaries and their keys, and at all else as ``to_plain`` converts it."""
    left: list[tuple[str, Any]] = [("", value)]
    while left:  # in the order in which the value is packed
        place, one = left.pop()
        if isinstance(one, str):
            if holds_half(one):
                return _problem(place, one)
        elif isinstance(one, dict):
            for key in reversed(one):
                inside = f"{place}.{key}" if isinstance(key, str) else f"{place}[{key!r}]"
                left += [(escaped(inside), one[key]), (f"a key of {place.removeprefix('.') or 'it'}", key)]
        elif isinstance(one, list | tuple):
            left += [(f"{place}[{number}]", each) for number, each in reversed([*enumerate(one)])]
        elif one is not None and not isinstance(one, int | float | bytes | bytearray | memoryview):
            left.append((place, to_plain(one)))
    return ""


def _problem(place: str, text: str) -> str:
    shown = repr(text)  # which escapes a half
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    where = place.removeprefix(".")
    return f"{where + ' is ' if where else ''}{shown}: half of a surrogate pair, which UTF-8 lacks"
