"""The interface of an API: bodies of requests to calls, answers to bodies."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..answer import Answer
from ..model_call import ApiError, Message, ModelCall

Body = Mapping[str, Any]
Earlier = Mapping[str, Sequence[Message]]
"""The conversations that a request may name by the id of their last call."""


class AnswerEvents(Protocol):
    """The server-sent events of one answer, each as it is on the wire."""

    def begin(self) -> bytes:
        """The events before all text."""
        ...

    def text(self, choice: int, reasoning: str, content: str) -> bytes:
        """The events of further text of a choice; one of the two may be empty."""
        ...

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The events behind all text: what is left of the answers, and their ends."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last events of an answer that has failed."""
        ...


class Api(Protocol):
    """``path``: behind the ``/v1`` of a session."""

    path: str

    def read(self, body: Body, earlier: Earlier) -> ModelCall:
        """Raises ApiError for an invalid body, and for one that asks for what no agent can do."""
        ...

    def answer(self, call: ModelCall, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a whole answer."""
        ...

    def events(self, call: ModelCall) -> AnswerEvents:
        """The events of an answer that streams."""
        ...

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The body of an error."""
        ...


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
