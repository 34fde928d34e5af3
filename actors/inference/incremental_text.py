"""The text of tokens that arrive one after the other. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

_INCOMPLETE: str = "\ufffd"
"""The character for a part of another one: the next token may complete it."""


@dataclass(frozen=True, slots=True)
class NewText:
    """``complete``: text that no later token changes. ``begun``: the text after it, up to a character that the next
    tokens may complete; it comes again."""

    complete: str
    begun: str


class IncrementalText:
    """Decodes tokens as they arrive.

    A token's text depends on the tokens before it. So each part is decoded together with the tokens of the last
    complete part (as vLLM's and TGI's detokenizers do), and not with all tokens of the turn.
    """

    def __init__(self, decode: Callable[[tuple[int, ...]], str]) -> None:
        self._decode = decode
        self._tokens: tuple[int, ...] = ()
        """Those of the last complete part, and those after it."""
        self._decoded = 0
        """The number of the former."""
        self._before = ""
        """Their text."""

    def take(self, tokens: tuple[int, ...]) -> NewText:
        """Adds tokens; returns the text after the last complete part."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        new = text[len(self._before) :]
        if not new or new.endswith(_INCOMPLETE):
            return NewText("", new.rstrip(_INCOMPLETE))  # the next tokens decide
        self._tokens = self._tokens[self._decoded :]
        self._decoded = len(self._tokens)
        self._before = self._decode(self._tokens)
        return NewText(new, "")
