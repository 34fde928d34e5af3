"""The text of a turn while it is generated, sent in parts to the worker that asked for it."""

from collections.abc import Callable

from ...core.errors import FlexmarlError, NoCredit
from ..messages import TextTo

_INCOMPLETE = "\ufffd"
"""The character for a part of another one: the next token may complete it."""


class TextStream:
    """Never waits: without credit the next part takes the text along, and after another error nothing is sent.

    A token's text depends on the tokens before it. So each part is decoded together with the tokens of the part before
    (as vLLM's and TGI's detokenizers do), and not with all tokens of the turn.
    """

    def __init__(
        self, to: TextTo, decode: Callable[[tuple[int, ...]], str], completion: tuple[int, ...]
    ) -> None:
        """``completion``: of the request."""
        self._to: TextTo | None = to
        self._decode = decode
        self._tokens = completion
        """Those of the last part, and those that no part has."""
        self._decoded = 0
        """The number of the former."""
        self._sent = 0
        self._unsent = ""

    def take(self, tokens: tuple[int, ...]) -> None:
        """Sends the text of new tokens, as soon as its last character is complete."""
        if self._to is None:
            return
        self._tokens += tokens
        text = self._decode(self._tokens)
        before = self._decode(self._tokens[: self._decoded])
        if len(text) > len(before) and not text.endswith(
            _INCOMPLETE
        ):  # else these tokens wait for the next ones
            self._unsent += text[len(before) :]
            self._tokens = self._tokens[self._decoded :]
            self._decoded = len(self._tokens)
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
