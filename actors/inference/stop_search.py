"""The first token with which the text of a turn contains one of its stop strings. Pure."""

from collections.abc import Callable, Sequence

from .engines.engine import EngineResult
from .incremental_text import IncrementalText


class StopSearch:
    """Looks at one token after the other, so that the end does not depend on the parts in which an engine hands its
    tokens out."""

    def __init__(
        self, stops: Sequence[str], decode: Callable[[tuple[int, ...]], str], completion: tuple[int, ...]
    ) -> None:
        """``completion``: of the request; a stop string may begin in it, and so may a character."""
        self._stops = stops
        self._text = IncrementalText(decode)
        self._overlap = max(map(len, stops)) - 1
        self._near = ""
        """The last characters that are complete: as many as a stop string can have before its last one."""
        self._seen = 0
        self.is_found = False
        self._search(completion)  # it has no stop string: the turn would have ended there

    def take(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Looks at new tokens; returns those that belong to the turn."""
        for number, token in enumerate(tokens):
            if self.is_found:
                return tokens[:number]
            self._seen += 1
            self.is_found = self._search((token,))
        return tokens

    def ended(self, result: EngineResult) -> EngineResult:
        """``result``, whose first tokens ``take`` may have got already, up to the token that ends a stop string."""
        if not self.is_found:
            self.take(result.tokens[self._seen :])
        if not self.is_found:
            return result
        return result.first(self._seen, "stop")

    def _search(self, tokens: tuple[int, ...]) -> bool:
        new = self._text.take(tokens)
        # The text that has begun counts: a token may end a stop string and begin a character, as b"> \xf0\x9f" does.
        text = self._near + new.complete
        self._near = text[-self._overlap :] if self._overlap else ""
        return any(stop in text + new.begun for stop in self._stops)
