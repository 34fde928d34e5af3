"""The text of a turn while it is generated, sent in parts to the worker that asked for it."""

from collections.abc import Callable

from ...core.errors import FlexmarlError, NoCredit
from ..messages import TextTo
from .incremental_text import IncrementalText


class TextStream:
    """Never waits: without credit the next part takes the text along, and after another error nothing is sent."""

    def __init__(
        self, to: TextTo, decode: Callable[[tuple[int, ...]], str], completion: tuple[int, ...]
    ) -> None:
        """``completion``: of the request."""
        self._to: TextTo | None = to
        self._text = IncrementalText(decode)
        self._sent = 0
        self._unsent = self._text.take(completion).complete

    def take(self, tokens: tuple[int, ...]) -> None:
        """Sends the text of new tokens, as soon as its last character is complete."""
        if self._to is None:
            return
        self._unsent += self._text.take(tokens).complete
        if self._unsent:
            self._send(self._to)

    def _send(self, to: TextTo) -> None:
        try:
            to.receiver.tell_nowait("take_text", to.stream, self._sent, self._unsent)
        except NoCredit:
            return
        except FlexmarlError:  # the receiver is gone: the answer will find that out
            self._to = None
            return
        self._sent += len(self._unsent)
        self._unsent = ""
