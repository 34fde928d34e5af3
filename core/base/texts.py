r"""Texts for people and for messages: escaped where UTF-8 or a terminal can't take them, cut where they are long.

Python's and JSON's strings may hold half of a surrogate pair alone, ``\ud83d``; UTF-8, and so a message, can't. A text
that programs read is sent exactly or refused; one that people read may be escaped. Texts of others (a model's, a
recipe's, another host's) may hold what a terminal obeys.
"""

import difflib
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Final

_SHOWN = 80
_OBEYED: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the order of reading (Unicode Standard Annex 9)
    r"\u2028\u2029"  # line and paragraph separators
    r"\ud800-\udfff]"  # halves of surrogates: no encoding has them
)


# --------------------------------------------------------------------------- halves of surrogate pairs


def escaped(text: str) -> str:
    r"""``text``, for people, with ``\ud83d`` written out in place of a half."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def holds_half(text: str) -> bool:
    """True if ``text`` holds half of a surrogate pair: no message can hold it."""
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
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:  # in the order in which the value is packed
        place, item = stack.pop()
        if isinstance(item, str):
            if holds_half(item):
                return _problem(place, item)
        elif isinstance(item, dict):
            for key in reversed(item):
                inside = f"{place}.{key}" if isinstance(key, str) else f"{place}[{key!r}]"
                stack += [(escaped(inside), item[key]), (f"a key of {place.removeprefix('.') or 'it'}", key)]
        elif isinstance(item, list | tuple):
            stack += [(f"{place}[{number}]", member) for number, member in reversed([*enumerate(item)])]
        elif item is not None and not isinstance(item, int | float | bytes | bytearray | memoryview):
            stack.append((place, to_plain(item)))
    return ""


def _problem(place: str, text: str) -> str:
    shown = repr(text)  # which escapes a half
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    where = place.removeprefix(".")
    return f"{where + ' is ' if where else ''}{shown}: half of a surrogate pair, which UTF-8 lacks"


# --------------------------------------------------------------------------- for people


def printable(text: str) -> str:
    r"""``text`` with escapes, ``\x1b`` or ``\u202e``, in place of the characters that a terminal obeys or can't show:
    control characters, those that turn the order of reading, and halves of surrogates. Line feeds and tabs stay."""
    return _OBEYED.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def text_of(error: BaseException) -> str:
    """``str(error)`` as it can be sent to people, also if ``__str__`` of its class raises."""
    try:
        return escaped(str(error))
    except Exception as broken:  # noqa: BLE001  # the class is a user's, and the first error matters more
        return f"(no text: its __str__ raised {type(broken).__name__})"


def traceback_of(error: BaseException) -> str:
    """As it can be sent to people."""
    return escaped("".join(traceback.format_exception(error)))


def guess(word: str, words: Iterable[str]) -> str:
    """``"; do you mean WORD?"`` with the one of ``words`` that is most like ``word``; empty if none is."""
    near = difflib.get_close_matches(word, list(words), 1)
    return f"; do you mean {near[0]}?" if near else ""


def listing(lines: list[str], at_most: int = 20) -> str:
    """``lines`` for the end of a message, one under the other; after ``at_most`` lines the rest is counted."""
    more = [f"and {len(lines) - at_most} more"] if len(lines) > at_most else []
    return "".join(f"\n  {line}" for line in lines[:at_most] + more)
