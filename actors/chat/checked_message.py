"""A message of a conversation, as chat templates take it. Pure."""

from collections.abc import Mapping
from typing import Any, Final


def checked_message(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a plain dictionary. Raises ValueError, which names the key."""
    name = f"messages[{number}]"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name} has no role: {_shorten(message)}")
    if unknown := [key for key in message if key not in _KEYS]:
        raise ValueError(f"{name} has the unknown key {unknown[0]!r}; known are: {', '.join(_KEYS)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{name}, of the role {role!r}, has the content {_shorten(content)}, needs a string")
    return dict(message)


_KEYS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
