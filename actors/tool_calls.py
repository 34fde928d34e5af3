"""Tools of an agent: their schemas from plain functions, and the calls in an answer's text.

An answer calls a tool as most open models do (Hermes, Qwen):

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"

Tool = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an answer. ``error``: the reason for which it can't be made, for the agent to read; empty if it
    can."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@lru_cache(maxsize=256)
def tool_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a function in the form that chat templates take: its name, its docstring, and the JSON schema of
    its annotated parameters. Raises ValueError if it is not an ``async def``, or an annotation has no JSON schema."""
    name = getattr(tool, "__name__", repr(tool))
    if not inspect.iscoroutinefunction(tool):
        raise ValueError(f"the tool {name} is not an async function")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(tool)  # type: ignore[arg-type]  # pydantic takes functions too
        parameters = adapter.json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        raise ValueError(f"the tool {name} has a parameter without a JSON schema: {error}") from error
    function = {"name": name, "description": inspect.getdoc(tool) or "", "parameters": parameters}
    return {"type": "function", "function": function}


def parse_tool_calls(text: str, names: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls in an answer, in order. ``names``: of the tools that there are."""
    return tuple(_parse(part, names) for part in text.split(_BEGIN)[1:])


def _parse(part: str, names: Collection[str]) -> ToolCall:
    written, end, _ = part.partition(_END)
    if not end:
        return ToolCall("", error=f"the call has no {_END}")
    try:
        call = json.loads(written)
    except ValueError as error:
        return ToolCall("", error=f"the call is not valid JSON: {error}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall("", error='the call is not {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(name, error="the arguments are not a JSON object")
    if name not in names:
        return ToolCall(name, arguments, f"there is no tool {name}; there is: {', '.join(names) or 'none'}")
    return ToolCall(name, arguments)
