"""The first token with which the text of a turn contains one of its stop strings. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from .engines.engine import EngineResult

_INCOMPLETE = "\ufffd"
"""The character for a part of another one: the next token may complete it."""


class StopSearch:
    """Looks at one token after the other, so that the end does not depend on the parts in which an engine hands its
    tokens out. Each token is decoded together with the tokens of the last complete part, as in ``TextStream``."""

    def __init__(
        self, stops: Sequence[str], decode: Callable[[tuple[int, ...]], str], completion: tuple[int, ...]
    ) -> None:
        """``completion``: of the request; a stop string may begin in it."""
        self._stops = stops
        self._decode = decode
        self._overlap = max(map(len, stops)) - 1
        self._part = completion
        self._decoded = len(completion)
        """The number of tokens of the last complete part; the others follow it."""
        self._tail = decode(completion)
        self._seen = 0
        self.is_found = False

    def take(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Looks at new tokens; returns those that belong to the turn."""
        for number, token in enumerate(tokens):
            if self.is_found:
                return tokens[:number]
            self._seen += 1
            self._look_at(token)
        return tokens

    def ended(self, result: EngineResult) -> EngineResult:
        """``result``, whose first tokens ``take`` may have got already, up to the token that ends a stop string."""
        if not self.is_found:
            self.take(result.tokens[self._seen :])
        if not self.is_found:
            return result
        end = self._seen
        return replace(
            result, tokens=result.tokens[:end], logprobs=result.logprobs[:end], finish_reason="stop"
        )

    def _look_at(self, token: int) -> None:
        self._part += (token,)
        text, before = self._decode(self._part), self._decode(self._part[: self._decoded])
        if len(text) <= len(before) or text.endswith(_INCOMPLETE):
            return  # the next tokens decide
        near = self._tail[-self._overlap :] if self._overlap else ""
        self._tail = near + text[len(before) :]
        self._part = self._part[self._decoded :]
        self._decoded = len(self._part)
        self.is_found = any(stop in self._tail for stop in self._stops)
