"""A program's request to a model, and the errors that it gets, in no API's own form. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """``model``: as the program names it. ``messages`` and ``tools`` are as ``Agent.generate`` takes them, ``options``
    are its keyword arguments. ``text``: the prompt if it is not messages. ``choices``: the answers that are wanted.
    ``streams``: the text is wanted as it comes. ``details``: of the request, for its API alone. ``remembered``: what
    a later request may name by ``id`` in the place of these messages; None if no API of it can."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    choices: int = 1
    streams: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    remembered: tuple[Message, ...] | None = None
    id: str = field(default_factory=lambda: uuid4().hex)

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer, and are not shown."""
        stop = self.options.get("stop") or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)


class ApiError(Exception):
    """The refusal or the failure of a request. ``status``: of HTTP. ``code``: the reason's short name, as the API
    has it or as the gateway does. ``parameter``: the key of the request at fault, or empty. ``retry_s``: a program may
    ask again after so many seconds; None: the answer would be the same, or cost a further turn."""

    def __init__(
        self,
        status: int,
        problem: str,
        *,
        code: str = "invalid_request",
        parameter: str = "",
        retry_s: int | None = None,
    ) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem
        self.code = code
        self.parameter = parameter
        self.retry_s = retry_s
