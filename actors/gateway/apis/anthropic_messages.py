"""Anthropic's API: ``/v1/messages``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..answer import Answer
from ..model_call import ApiError, Message, ModelCall
from .api import AnswerEvents, Api, Body, Earlier, event
from .reading import (
    checked_messages,
    checked_tools,
    json_form,
    list_of,
    mapping_of,
    model_of,
    refuse,
    text_of_parts,
    tool_call,
)

_OPTIONS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "max_tokens": "max_new_tokens",
}
_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_BILLING: Final = "x-anthropic-billing-header"


class AnthropicMessages(Api):
    """See https://docs.anthropic.com/en/api/messages."""

    path = "/messages"

    def read(self, body: Body, earlier: Earlier) -> ModelCall:
        for key in ("mcp_servers", "container"):
            refuse(body, key, "agents write text and calls of the program's tools alone")
        choice = mapping_of(body, "tool_choice")
        tools = [] if choice.get("type") == "none" else [_tool(tool) for tool in list_of(body, "tools")]
        messages = [*_system(body.get("system"))]
        for number, message in enumerate(list_of(body, "messages")):
            messages += _messages(f"messages[{number}]", message)
        return ModelCall(
            model_of(body),
            checked_messages(messages),
            checked_tools(tools),
            {
                **{name: body[key] for key, name in _OPTIONS.items() if body.get(key) is not None},
                **_forced_call(choice),
                **_form(body),
            },
            streams=bool(body.get("stream")),
        )

    def answer(self, call: ModelCall, answers: Sequence[Answer]) -> dict[str, Any]:
        answer = answers[0]
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append(_thinking(answer.reasoning))
        if answer.content:
            content.append(_text(answer.content))
        content += [
            {"type": "tool_use", "id": use.id, "name": use.name, "input": json.loads(use.arguments)}
            for use in answer.calls
        ]
        return {**_head(call), "content": content, **_end(answer), "usage": _usage(answer)}

    def events(self, call: ModelCall) -> AnswerEvents:
        return _Events(call)

    def failure(self, error: ApiError) -> dict[str, Any]:
        return anthropic_failure(error)


def anthropic_failure(error: ApiError) -> dict[str, Any]:
    """The body of an error's answer."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.problem}}


def _forced_call(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The option of a turn for a ``tool_choice``. Raises ApiError."""
    match {"type": "auto", **choice}:
        case {"type": "auto" | "none"}:
            return {}
        case {"type": "any"}:
            return {"must_call": True}
        case {"type": "tool", "name": str(name)} if name:
            return {"must_call": name}
    raise ApiError(
        400,
        "tool_choice: needs the type auto, none, any, or tool with its name",
        code="unsupported",
        parameter="tool_choice",
    )


def _form(body: Body) -> dict[str, Any]:
    """The option of a turn for the form of the answer, which has had two names in this API. Raises ApiError."""
    form = mapping_of(mapping_of(body, "output_config"), "format") or mapping_of(body, "output_format")
    return json_form({"type": "text", **form}, "output_config.format")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of OpenAI's chat API."""
    name = tool.get("name")
    if tool.get("type", "custom") not in ("custom", None) or "input_schema" not in tool:
        raise ApiError(
            400, f"the tool {name!r} is not one of the program's: needs an input_schema", parameter="tools"
        )
    function = {"name": name, "parameters": tool["input_schema"]}
    if description := tool.get("description"):
        function["description"] = description
    return {"type": "function", "function": function}


def _system(system: Any) -> Iterator[Message]:
    """A harness writes the hash of each request into a first block: with it no request would continue another."""
    if isinstance(system, list):
        system = [
            block
            for block in system
            if not (isinstance(block, Mapping) and str(block.get("text")).startswith(_BILLING))
        ]
    if text := text_of_parts(system, "system", "\n"):
        yield {"role": "system", "content": text}


def _messages(where: str, message: Mapping[str, Any]) -> Iterator[Message]:
    """A message of the body as templates take it: each result of a tool is one by itself."""
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        yield _assistant(where, content)
        return
    if role not in ("user", "system"):
        raise ApiError(
            400, f"{where}.role is {role!r}, needs 'user' or 'assistant'", parameter=f"{where}.role"
        )
    blocks = content if isinstance(content, list) else []
    results = [block for block in blocks if isinstance(block, Mapping) and block.get("type") == "tool_result"]
    for result in results:
        yield {
            "role": "tool",
            "tool_call_id": result.get("tool_use_id"),
            "content": text_of_parts(result.get("content"), f"{where}.content", "\n"),
        }
    rest = [block for block in blocks if block not in results] if results else content
    if rest or not results:
        yield {"role": role, "content": text_of_parts(rest, f"{where}.content", "\n")}


def _assistant(where: str, content: Any) -> Message:
    """An answer of the conversation."""
    if not isinstance(content, list):
        return {"role": "assistant", "content": text_of_parts(content, f"{where}.content")}
    thoughts, texts, calls = [], [], []
    for block in content:
        match block:
            case {"type": "tool_use", "name": name, "input": arguments}:
                calls.append(tool_call(block.get("id"), name, json.dumps(arguments)))
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                texts.append(block)
    message: Message = {"role": "assistant", "content": text_of_parts(texts, f"{where}.content")}
    if reasoning := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": calls} if calls else message


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _head(call: ModelCall) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.model}


def _end(answer: Answer) -> dict[str, Any]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if answer.stop and answer.finish == "stop" else reasons[answer.finish]
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _usage(answer: Answer | None) -> dict[str, Any]:
    return {
        "input_tokens": len(answer.turn.prompt_tokens) if answer else 0,
        "output_tokens": len(answer.turn.tokens) if answer else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


class _Events(AnswerEvents):
    """``_block``: the number of the open block, or of the next one; ``_kind``: of the open block, empty if there is
    none."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._block = 0
        self._kind = ""

    def begin(self) -> bytes:
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None),
        }
        return _event("message_start", message={**_head(self._call), **empty})

    def text(self, choice: int, reasoning: str, content: str) -> bytes:
        events = b""
        if reasoning:
            events += self._open("thinking", _thinking(""))
            events += self._delta({"type": "thinking_delta", "thinking": reasoning})
        if content:
            events += self._open("text", _text(""))
            events += self._delta({"type": "text_delta", "text": content})
        return events

    def end(self, answers: Sequence[Answer]) -> bytes:
        events = self._close()
        for use in answers[0].calls:
            block = {"type": "tool_use", "id": use.id, "name": use.name, "input": {}}
            events += self._open("tool_use", block)
            events += self._delta({"type": "input_json_delta", "partial_json": use.arguments})
            events += self._close()
        events += _event("message_delta", delta=_end(answers[0]), usage=_usage(answers[0]))
        return events + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return event(anthropic_failure(error), "error")

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._kind == kind:
            return b""
        closed = self._close()
        self._kind = kind
        return closed + _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        self._block += 1
        return _event("content_block_stop", index=self._block - 1)


def _event(kind: str, **rest: Any) -> bytes:
    return event({"type": kind, **rest}, kind)
