"""An answer's text, and the calls of tools in it. Pure.

An answer calls a tool as most open models do (Hermes, Qwen):

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

A call within the answer's reasoning (``<think>...</think>``) is a thought about a call, and none. Other models write
calls in other forms, of which this module knows nothing: see ``foreign_form``.
"""

import json
import re
from collections.abc import Collection
from typing import Any, Final

from ...core.base.texts import half_problem
from ..environments.tool_calls import ToolCall

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
_THOUGHT: Final = re.compile(r"<think>.*?</think>", re.DOTALL)


def parse_tool_calls(text: str, names: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls in an answer, in order. ``names``: of the tools that there are."""
    return tuple(_parse(part, names) for part in _without_thoughts(text).split(CALL_BEGIN)[1:])


def _without_thoughts(text: str) -> str:
    """``text`` without its reasoning. Some chat templates begin it in the prompt: then the answer has only its end. An
    answer that was cut off within it has only its beginning."""
    if "think>" not in text:
        return text
    text = _THOUGHT.sub("", text)
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _parse(part: str, names: Collection[str]) -> ToolCall:
    written, end, _ = part.partition(CALL_END)
    if not end:
        return ToolCall("", error=f"the call has no {CALL_END}")
    try:
        call = json.loads(written)
    except ValueError as error:
        return ToolCall("", error=f"the call is not valid JSON: {error}")
    if problem := half_problem(call):  # JSON's escapes can write one
        return ToolCall("", error=f"the call holds text that can't be read: {problem}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall("", error='the call is not {"name": ..., "arguments": {...}}')
    # Llama's name for them: the call would be made without any.
    if "parameters" in call and "arguments" not in call:
        return ToolCall(name, error='the call has "parameters": write "arguments"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(name, error="the arguments are not a JSON object")
    if name not in names:
        return ToolCall(name, arguments, f"there is no tool {name}; there is: {', '.join(names) or 'none'}")
    return ToolCall(name, arguments)


_EXAMPLE: Final = ToolCall("add", {"a": 1, "b": 2})


def foreign_form(tokenizer: Any) -> str | None:
    """The reason for which calls of a model with this tokenizer (of transformers) are silently no calls here; None if
    they are, or if it has no chat template.

    Has the chat template write a call into a conversation, and parses the result: so no list of models is needed."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    parameters = {"type": "object", "properties": {name: {"type": "integer"} for name in _EXAMPLE.arguments}}
    function = {"name": _EXAMPLE.name, "description": "The sum.", "parameters": parameters}
    call = {"type": "function", "function": {"name": _EXAMPLE.name, "arguments": dict(_EXAMPLE.arguments)}}
    question = {"role": "user", "content": "1 + 2?"}
    messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    schema = {"type": "function", "function": function}
    try:
        written = str(tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False))
    except Exception as error:  # noqa: BLE001  # a template's own code: any error means that it writes no calls
        return f"its chat template takes no calls of tools ({type(error).__name__}: {error})"
    if _EXAMPLE.name not in written:  # it leaves calls where answers have them: in the content
        return None
    if _EXAMPLE not in parse_tool_calls(written, [_EXAMPLE.name]):
        return f"its chat template writes them in another form than {CALL_BEGIN}{{...}}{CALL_END}"
    return None
