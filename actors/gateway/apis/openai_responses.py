"""OpenAI's API of responses: ``/v1/responses``.

An input is a list of items. Those of one answer (its reasoning, its text, its calls) are one message here:

    message(user) | reasoning  message(assistant)  function_call  function_call | function_call_output
    user          | assistant with two calls                                    | tool
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..answer import Answer
from ..model_call import ApiError, Message, ModelCall
from .api import AnswerEvents, Api, Body, Earlier
from .openai_common import forced_call, openai_failure, options_of
from .openai_response_events import ResponseEvents, response
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

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_OPTIONS: Final = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_new_tokens"}


class OpenaiResponses(Api):
    """See https://platform.openai.com/docs/api-reference/responses."""

    path = "/responses"

    def read(self, body: Body, earlier: Earlier) -> ModelCall:
        refuse(body, "background", "an answer is given to the request that asks for it")
        refuse(body, "conversation", "a session keeps answers alone: pass previous_response_id")
        refuse(body, "prompt", "a session keeps no prompts")
        form = {"type": "text", **mapping_of(mapping_of(body, "text"), "format")}
        choice = body.get("tool_choice")
        tools = [] if choice == "none" else list_of(body, "tools")
        previous = body.get("previous_response_id")
        messages = [*_earlier(previous, earlier), *_messages(body.get("input"))]
        instructions = text_of_parts(body.get("instructions"), "instructions")
        head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        checked = checked_messages([*head, *messages])
        return ModelCall(
            model_of(body),
            checked,
            checked_tools([_tool(tool) for tool in tools]),
            {**options_of(body, _OPTIONS), **forced_call(choice), **json_form(form, "text.format")},
            streams=bool(body.get("stream")),
            details={
                "instructions": instructions or None,
                "previous_response_id": previous,
                "store": body.get("store") is not False,
                "tools": tools,
                "tool_choice": choice or ("auto" if tools else "none"),
                "form": form,
                "metadata": body.get("metadata") or {},
            },
            remembered=None if body.get("store") is False else checked[len(head) :],
        )

    def answer(self, call: ModelCall, answers: Sequence[Answer]) -> dict[str, Any]:
        return response(call, answers[0])

    def events(self, call: ModelCall) -> AnswerEvents:
        return ResponseEvents(call)

    def failure(self, error: ApiError) -> dict[str, Any]:
        return openai_failure(error)


def _earlier(previous: Any, earlier: Earlier) -> Sequence[Message]:
    """The conversation up to an earlier response. Raises ApiError."""
    if previous is None:
        return ()
    messages = earlier.get(str(previous).removeprefix("resp_"))
    if messages is None:
        raise ApiError(
            400,
            f"there is no response {previous!r} in this session, or it was not stored",
            code="previous_response_not_found",
            parameter="previous_response_id",
        )
    return messages


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of the chat API."""
    if tool.get("type") != "function":
        raise ApiError(
            400,
            f"tools: there is none of the kind {tool.get('type')!r}, only functions of the program's",
            code="unsupported",
            parameter="tools",
        )
    keys = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {key: tool[key] for key in keys if tool.get(key) is not None},
    }


def _messages(items: Any) -> list[Message]:
    """The messages of an input. Raises ApiError."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        kind = type(items).__name__
        raise ApiError(400, f"input is {kind}, needs a string or a list of items", parameter="input")
    messages: list[Message] = []
    open_answer: Message | None = None
    thought: dict[str, str] = {}
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise ApiError(400, f"{where} is {type(item).__name__}, needs an object", parameter="input")
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought, open_answer = _reasoning_of(item), None
            continue
        if kind == "function_call":
            if open_answer is None:
                open_answer = {"role": "assistant", "content": "", **thought}
                thought = {}
                messages.append(open_answer)
            call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            open_answer.setdefault("tool_calls", []).append(call)
            continue
        messages.append(_message(where, kind, item))
        open_answer = messages[-1] if messages[-1]["role"] == "assistant" else None
        if open_answer is not None:
            open_answer |= thought
        thought = {}
    return messages


def _reasoning_of(item: Mapping[str, Any]) -> dict[str, str]:
    """The reasoning of an item as a key of the answer that it is a part of."""
    parts = [part.get("text") for part in list_of(item, "content") if part.get("type") == "reasoning_text"]
    text = "\n".join(part for part in parts if isinstance(part, str) and part)
    return {"reasoning_content": text} if text else {}


def _message(where: str, kind: Any, item: Mapping[str, Any]) -> Message:
    if kind == "function_call_output":
        output = text_of_parts(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind != "message":
        raise ApiError(
            400, f"{where} is an item of the kind {kind!r}: agents read text and calls of functions",
            code="unsupported", parameter="input",
        )  # fmt: skip
    if (role := _ROLES.get(str(item.get("role")))) is None:
        raise ApiError(400, f"{where}.role is {item.get('role')!r}", parameter="input")
    return {"role": role, "content": text_of_parts(item.get("content"), f"{where}.content")}
