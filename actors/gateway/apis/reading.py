"""Checks of keys that the bodies of several APIs have. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...chat.checked_message import checked_message
from ...environments.tool_calls import tool_schema
from ..model_call import ApiError, Message

MOST_CHOICES: Final = 16
TEXT_KINDS: Final = ("text", "input_text", "output_text", "refusal")


def checked_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Raises ApiError, which names the message.

    A last message that is an answer is refused: its continuation would be an answer that the model has begun with
    another's tokens, and no training could tell the two apart."""
    if not messages:
        raise ApiError(400, "there are no messages", parameter="messages")
    try:
        checked = tuple(checked_message(number, message) for number, message in enumerate(messages))
    except ValueError as problem:
        raise ApiError(400, str(problem), parameter="messages") from None
    if checked[-1]["role"] == "assistant":
        raise ApiError(
            400,
            "the last message is the assistant's: an agent begins its answers itself",
            code="unsupported",
            parameter="messages",
        )
    return checked


def checked_tools(tools: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """``tools``: in the form of OpenAI's chat API. Raises ApiError."""
    try:
        return tuple(tool_schema(tool) for tool in tools)
    except ValueError as problem:
        raise ApiError(400, str(problem), parameter="tools") from None


def tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call of a tool within a message. Raises ApiError."""
    if not isinstance(name, str) or not name:
        raise ApiError(400, "a call of a tool has no name", parameter="messages")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments or "{}"},
    }


def model_of(body: Mapping[str, Any]) -> str:
    """Raises ApiError."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "the body names no model", parameter="model")
    return model


def list_of(body: Mapping[str, Any], key: str, kind: type = dict) -> list[Any]:
    """The list at ``key``, or an empty list. Raises ApiError for another kind of value."""
    values = body.get(key)
    if values is None:
        return []
    if not isinstance(values, list):
        raise ApiError(400, f"{key} is {type(values).__name__}, needs a list", parameter=key)
    for number, value in enumerate(values):
        if not isinstance(value, kind):
            raise ApiError(
                400, f"{key}[{number}] is {type(value).__name__}, needs {kind.__name__}", parameter=key
            )
    return values


def mapping_of(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at ``key``, or an empty object. Raises ApiError for another kind of value."""
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ApiError(400, f"{key} is {type(value).__name__}, needs an object", parameter=key)
    return value


def text_of_parts(content: Any, where: str, between: str = "") -> str:
    """The text of a message's content: a string, or a list of parts. Raises ApiError for an image and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is {type(content).__name__}, needs text", parameter=where)
    return between.join(_text(part, where) for part in content)


def _text(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") in TEXT_KINDS:
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ApiError(400, f"{where} has a part of the kind {kind!r}: agents read text alone", parameter=where)


def choices_of(body: Mapping[str, Any]) -> int:
    """The number of answers that a request wants. Raises ApiError."""
    number = 1 if body.get("n") is None else body["n"]
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_CHOICES:
        raise ApiError(400, f"n is {number!r}, needs 1 to {MOST_CHOICES}", parameter="n")
    return number


def refuse(body: Mapping[str, Any], key: str, reason: str) -> None:
    """Raises ApiError if ``body`` has anything at ``key``."""
    if body.get(key):
        raise ApiError(400, f"{key}: {reason}", code="unsupported", parameter=key)


def refuse_other(body: Mapping[str, Any], key: str, allowed: Sequence[Any], reason: str) -> None:
    """Raises ApiError if ``body`` has another value at ``key`` than None and those that are allowed."""
    value = body.get(key)
    if value is not None and value not in allowed:
        raise ApiError(400, f"{key}: {reason}", code="unsupported", parameter=key)


def json_form(form: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The option of a turn for the form that a request wants of its answer. ``form``: of the kind ``text``,
    ``json_object`` or ``json_schema``, with its ``schema``. Raises ApiError."""
    match form:
        case {"type": "text"} | {"type": None}:
            return {}
        case {"type": "json_object"}:
            return {"schema": {"type": "object"}}
        case {"type": "json_schema", "schema": {**schema}}:
            return {"schema": schema}
        case {"type": "json_schema"}:
            raise ApiError(400, f"{where} has no schema that is an object", parameter=where)
    kind = form.get("type")
    raise ApiError(
        400,
        f"{where} is of the type {kind!r}, needs text, json_object or json_schema",
        code="unsupported",
        parameter=where,
    )
