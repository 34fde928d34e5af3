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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from xxhash import xxh3_64_hexdigest

from ...core.base.texts import half_problem
from ..environments.tool_calls import ToolCall

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
_THOUGHT: Final = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as an answer has it. ``arguments``: a JSON object, as text: messages between processes take fewer objects
    than a model may write. ``id`` and ``error``: as ``ToolCall`` has them."""

    name: str
    arguments: str = "{}"
    error: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in its parts. ``content``: without reasoning and calls. A call that can't be read is among ``calls``,
    with its error, and stays in ``content`` as it was written."""

    content: str
    reasoning: str = ""
    calls: tuple[WrittenCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The message of a conversation, in the form of OpenAI's API. The content is a string also if there are only
        calls: templates join it to others."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if fields := [_field(call) for call in self.calls if not call.error]:
            message["tool_calls"] = fields
        return message

    def tool_calls(self, names: Collection[str]) -> tuple[ToolCall, ...]:
        """The calls, with an error for those of other tools than ``names``."""
        return tuple(_tool_call(call, names) for call in self.calls)

    def agrees(self, other: "Answer") -> bool:
        """True if both have the same content, apart from blanks around it, and the same calls in the same order."""
        return self.content.strip() == other.content.strip() and self._deeds == other._deeds

    @property
    def _deeds(self) -> list[tuple[str, Any, str]]:
        return [(call.name, json.loads(call.arguments), call.error) for call in self.calls]

    def with_ids(self, turn: str) -> "Answer":
        """The same with ids for the calls that have none yet. ``turn``: a name that no other turn has.

        Nine letters and digits: some templates (Mistral's) refuse others."""
        calls = tuple(
            call
            if call.id or call.error
            else replace(call, id=xxh3_64_hexdigest(f"{turn} {number}".encode())[:9])
            for number, call in enumerate(self.calls)
        )
        return replace(self, calls=calls)


def _field(call: WrittenCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_call(call: WrittenCall, names: Collection[str]) -> ToolCall:
    error = call.error
    if not error and call.name not in names:
        error = f"there is no tool {call.name}; there is: {', '.join(names) or 'none'}"
    return ToolCall(call.name, json.loads(call.arguments), error, call.id)


def call_text(function: Mapping[str, Any]) -> str:
    """A call as text. Arguments that are JSON of a model's own may be invalid: the reader finds that out."""
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    begin, end = around_arguments(function["name"])
    return f"{begin}{arguments}{end}"


def around_arguments(name: str) -> tuple[str, str]:
    """The text of a call of the tool ``name`` before its arguments, and behind them."""
    return f'{CALL_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{CALL_END}"


def with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls in the content: for readers without fields for them."""
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls := message.get("tool_calls"):
        written = (call_text(call["function"]) for call in calls)
        plain["content"] = "\n".join(filter(None, (message.get("content"), *written)))
    return plain


def parse_answer(text: str) -> Answer:
    """The parts of an answer in the form that most open models write."""
    if CALL_BEGIN not in text and "think>" not in text:
        return Answer(text)
    reasoning, rest = _split_thoughts(text)
    content, *parts = rest.split(CALL_BEGIN)
    calls: list[WrittenCall] = []
    for part in parts:
        written, end, behind = part.partition(CALL_END)
        calls.append(_parse(written) if end else WrittenCall("", error=f"the call has no {CALL_END}"))
        content += CALL_BEGIN + part if calls[-1].error else behind
    return Answer(content.strip(), reasoning.strip(), tuple(calls))


def without_reasoning(text: str) -> str:
    """Returns an answer as it was written, calls included, but without its reasoning."""
    return text if "think>" not in text else _split_thoughts(text)[1].strip()


def _split_thoughts(text: str) -> tuple[str, str]:
    """The reasoning in ``text``, and the rest. Some chat templates begin it in the prompt: then the answer has only its
    end. An answer that was cut off within it has only its beginning."""
    if "think>" not in text:
        return "", text
    thoughts = _THOUGHT.findall(text)
    begun, _, rest = _THOUGHT.sub("", text).rpartition("</think>")
    rest, _, cut_off = rest.partition("<think>")
    return "\n".join(filter(None, (begun, *thoughts, cut_off))), rest


def _parse(written: str) -> WrittenCall:
    try:
        return _read(json.loads(written))
    except (ValueError, RecursionError) as error:
        return WrittenCall("", error=f"the call is not valid JSON: {error}")


def _read(call: Any) -> WrittenCall:
    if problem := half_problem(call):  # JSON's escapes can write one
        return WrittenCall("", error=f"the call holds text that can't be read: {problem}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return WrittenCall("", error='the call is not {"name": ..., "arguments": {...}}')
    # Llama's name for them: the call would be made without any.
    if "parameters" in call and "arguments" not in call:
        return WrittenCall(name, error='the call has "parameters": write "arguments"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return WrittenCall(name, error="the arguments are not a JSON object")
    return WrittenCall(name, json.dumps(arguments, ensure_ascii=False))


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
    if _EXAMPLE not in parse_answer(written).tool_calls([_EXAMPLE.name]):
        return f"its chat template writes them in another form than {CALL_BEGIN}{{...}}{CALL_END}"
    return None
