"""Checks of keys that the bodies of several APIs have. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from ...chat.checked_message import checked_message
from ...environments.tool_calls import tool_schema
from ..model_call import ApiError, Message

MOST_CHOICES: Final = 16


def checked_messages(messages: list[Message]) -> tuple[Message, ...]:
    """Raises ApiError, which names the message."""
    try:
        return tuple(checked_message(number, message) for number, message in enumerate(messages))
    except ValueError as problem:
        raise ApiError(400, str(problem), parameter="messages") from None


def checked_tools(tools: list[Any]) -> tuple[dict[str, Any], ...]:
    """``tools``: in the form of OpenAI's chat API. Raises ApiError."""
    try:
        return tuple(tool_schema(tool) for tool in tools if isinstance(tool, Mapping))
    except ValueError as problem:
        raise ApiError(400, str(problem), parameter="tools") from None


def list_of(body: Mapping[str, Any], key: str, kind: type = dict) -> list[Any]:
    """The list at ``key``; an empty one if there is none. Raises ApiError."""
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


def text_of_parts(
    content: Any, where: str, kinds: tuple[str, ...] = ("text", "input_text", "output_text")
) -> str:
    """The text of a message's content: a string, or a list of parts. Raises ApiError for an image and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is {type(content).__name__}, needs text", parameter=where)
    texts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in kinds and isinstance(part.get("text"), str):
            texts.append(part["text"])
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ApiError(
            400, f"{where} has a part of the kind {kind!r}: agents read text alone", parameter=where
        )
    return "".join(texts)


def choices_of(body: Mapping[str, Any]) -> int:
    """The number of answers that a request wants. Raises ApiError."""
    number = body.get("n") or 1
    if not isinstance(number, int) or not 1 <= number <= MOST_CHOICES:
        raise ApiError(400, f"n is {number!r}, needs 1 to {MOST_CHOICES}", parameter="n")
    return number


def refuse(body: Mapping[str, Any], key: str, allowed: tuple[Any, ...], reason: str) -> None:
    """Raises ApiError if ``body`` has another value at ``key`` than None and those that are allowed."""
    value = body.get(key)
    if value is not None and value not in allowed:
        raise ApiError(400, f"{key}: {reason}", code="unsupported", parameter=key)
