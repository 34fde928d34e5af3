"""Runs the tool calls of a turn for a workflow, within limits. Its errors are the agent's to read."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from ..errors import LimitReached, RecipeError, ToolServerLost
from ..workflow import Turn
from .tool_calls import Tool, ToolCall, ToolDeclaration, declaration_of

_ToolsByName = dict[str, tuple[Tool, ToolDeclaration]]


async def run_tools(
    turn: Turn,
    tools: Sequence[Tool],
    *,
    timeout_s: float = 30.0,
    max_chars: int = 10_000,
    max_calls: int = 16,
) -> list[dict[str, Any]]:
    """Makes all calls in the turn's text at once. Returns their messages, of the role ``tool``, in the order of the
    calls; empty if the turn has none.

    Arguments are validated and converted as the tool's annotations say. A result other than a string is given as JSON.
    The message begins with ``error:`` for a call that can't be made, for a tool that raises or takes longer than
    ``timeout_s``, and for the calls after the first ``max_calls``. A result beyond ``max_chars`` characters is cut, and
    says so. A tool that ignores its cancellation is left behind: nothing waits for it.

    Raises ValueError for a tool without a schema, for two of one name, and for limits that are not positive; and what
    an agent raises that a tool asks for a turn: RecipeError, LimitReached; and ToolServerLost, as the agent has no part
    in the loss of a server.
    """
    if timeout_s <= 0 or max_chars < 1 or max_calls < 1:
        raise ValueError(
            f"run_tools: timeout_s={timeout_s!r}, max_chars={max_chars!r} and max_calls={max_calls!r} must be positive"
        )
    tools_by_name = _by_name(tools)
    calls = turn.parts.tool_calls(list(tools_by_name))
    begun = [
        asyncio.create_task(_result(call, tools_by_name), name=f"tool {call.name}")
        for call in calls[:max_calls]
    ]
    try:
        if begun:
            await asyncio.wait(begun, timeout=timeout_s)
    finally:
        for task in begun:
            task.cancel()
            task.add_done_callback(_retrieve)
    texts = [_text(task, timeout_s) for task in begun]
    texts += [f"error: only {max_calls} calls are made in one turn"] * len(calls[max_calls:])
    return [_message(call, _cut(text, max_chars)) for call, text in zip(calls, texts, strict=True)]


def _message(call: ToolCall, content: str) -> dict[str, Any]:
    named = {"tool_call_id": call.id} if call.id else {}
    return {"role": "tool", **named, "name": call.name, "content": content}


def _by_name(tools: Sequence[Tool]) -> _ToolsByName:
    tools_by_name: _ToolsByName = {}
    for tool in tools:
        declaration = declaration_of(tool)
        if declaration.name in tools_by_name:
            raise ValueError(f"run_tools: two tools have the name {declaration.name}")
        tools_by_name[declaration.name] = (tool, declaration)
    return tools_by_name


async def _result(call: ToolCall, tools_by_name: _ToolsByName) -> str:
    """The message's text. Raises what a turn of an agent raises that ends its trajectory or the run."""
    if call.error:
        return f"error: {call.error}"
    tool, declaration = tools_by_name[call.name]
    try:
        return _as_text(await tool(**declaration.check(call.arguments)))
    except (LimitReached, RecipeError, ToolServerLost):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the tool's, for the agent; the others continue
        return f"error: {type(error).__name__}: {error}"


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _text(task: "asyncio.Task[str]", timeout_s: float) -> str:
    if not task.done():
        return f"error: no result within {timeout_s:g} s"
    return "error: the tool was cancelled" if task.cancelled() else task.result()


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}... (cut: {len(text)} characters)"


def _retrieve(task: "asyncio.Task[str]") -> None:
    if not task.cancelled():
        task.exception()  # marks it as retrieved: after its deadline nothing waits for the tool
