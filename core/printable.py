"""Texts of others on a terminal: a model, a recipe, a name or another host may have put in what a terminal obeys."""

import re
from typing import Final

_OBEYED: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the order of reading (Unicode Standard Annex 9)
    r"\u2028\u2029"  # line and paragraph separators
    r"\ud800-\udfff]"  # halves of surrogates: no encoding has them
)


def printable(text: str) -> str:
    r"""``text`` with escapes, ``\x1b`` or ``\u202e``, in place of the characters that a terminal obeys or can't show:
    control characters, those that turn the order of reading, and halves of surrogates. Line feeds and tabs stay."""
    return _OBEYED.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
