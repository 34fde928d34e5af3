"""Requests to an endpoint with the OpenAI API, and the texts in its answers. Pure.

Workflows write and read the calls of tools as text, as most open models do (``chat.answer``). The API has fields for
them: they become fields on the way there, and text again on the way back.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ...chat.answer import CALL_BEGIN, call_text, parse_answer, with_calls_as_text
from ...chat.byte_codec import ByteCodec
from ...errors import EndpointFailed, InvalidRequest
from ..inference_config import OpenaiEngineConfig
from .engine import EngineRequest, EngineResult

_SHOWN: Final = 200
_EVENT: Final = "data:"
_LAST_EVENT: Final = "[DONE]"


def call_of(
    request: EngineRequest, config: OpenaiEngineConfig, codec: ByteCodec
) -> tuple[str, dict[str, Any]]:
    """The path and the body for ``request``. Raises InvalidRequest for sampling that the API does not have."""
    cut, chat = request.truncation, request.chat
    body: dict[str, Any] = {
        "model": config.model,
        "temperature": request.temperature,
        "max_tokens": request.max_new_tokens,
        "seed": request.seed % 2**31,  # the range of every server
    }
    if cut is not None:
        for key in ("top_k", "min_p"):
            if getattr(cut, key):
                raise InvalidRequest(request.request_id, f"{key}: the engine openai has no such option")
        body["top_p"] = cut.top_p
    if request.stop:
        body["stop"] = [*request.stop]
    if chat is None:
        return "/completions", body | {"prompt": codec.decode(request.prompt_tokens)}
    if chat.tools:
        return "/chat/completions", body | {
            "tools": [*chat.tools],
            "messages": [*_with_calls(chat.messages)],
        }
    return "/chat/completions", body | {"messages": [*chat.messages]}


def _with_calls(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """``messages`` with the calls of an answer as fields, also those in its text. Results of tools follow in the order
    of the calls, of which the API takes as many as have a result."""
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message["role"] == "tool" and waiting and "tool_call_id" not in message:
            yield {**message, "tool_call_id": waiting.pop(0)}
            continue
        fields, text = _fields(place, message)
        results = _results_behind(messages[place + 1 :])
        if not fields:
            yield dict(message)
        elif not results:
            yield with_calls_as_text(message)
        else:
            named = {result.get("tool_call_id") for result in messages[place + 1 : place + 1 + results]}
            waiting = [field["id"] for field in fields[:results] if field["id"] not in named]
            yield {**message, "content": text, "tool_calls": fields[:results]}


def _fields(place: int, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The calls of an answer, and its content without them: they may be fields, or text that a workflow has written.
    One that can't be read is always text."""
    text = message.get("content") or ""
    fields = [*(message.get("tool_calls") or ())]
    if message["role"] != "assistant" or not (fields or CALL_BEGIN in text):
        return [], text
    for number, call in enumerate(parse_answer(text).calls, len(fields)):
        function = {"name": call.name or "invalid", "arguments": call.arguments}
        fields.append({"id": f"call_{place}_{number}", "type": "function", "function": function})
    return fields, text.partition(CALL_BEGIN)[0]


def _results_behind(messages: Sequence[Mapping[str, Any]]) -> int:
    """The messages of tools at the beginning."""
    return next(
        (n for n, message in enumerate(messages) if message["role"] != "tool"),
        len(messages),
    )


def result_of(name: str, answer: Any, url: str) -> EngineResult:
    """The result in an answer of the endpoint. Raises EndpointFailed if there is no text in it."""
    try:
        choice = answer["choices"][0]
        text = _text_of(choice["message"]) if "message" in choice else choice["text"]
        reason = choice.get("finish_reason")
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise EndpointFailed(url, f"its answer has no text: {answer!s:.{_SHOWN}}") from error
    if not isinstance(text, str) or reason not in ("stop", "length", "tool_calls"):
        raise EndpointFailed(url, f"its answer has no complete text: finish_reason is {reason!r}")
    tokens = tuple(text.encode(errors="replace"))
    return EngineResult(name, tokens, (), "length" if reason == "length" else "stop")


def _text_of(message: Mapping[str, Any]) -> str | None:
    """The text of an answer, its calls behind it; None if it has neither."""
    text, calls = message.get("content"), message.get("tool_calls") or ()
    if not calls:
        return text
    written = [call_text(call["function"]) for call in calls]
    return "\n".join([text, *written] if text else written)


class StreamedAnswer:
    """Puts the server-sent events of an answer together."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._is_chat = False
        self._reason: str | None = None

    def take(self, line: str) -> str:
        """Takes a line; returns the text in it. Raises ValueError for an event that is not one of the API's."""
        event = line.removeprefix(_EVENT).strip()
        if not line.startswith(_EVENT) or event == _LAST_EVENT:
            return ""
        try:
            payload = json.loads(event)
            if not payload.get("choices"):  # the usage, or an error, behind the text
                if "error" in payload:
                    raise ValueError(str(payload["error"]))
                return ""
            choice = payload["choices"][0]
            self._reason = choice.get("finish_reason") or self._reason
            self._is_chat = self._is_chat or "delta" in choice
            delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
            for call in delta.get("tool_calls") or ():
                self._take_call(call)
            text = delta.get("content") or ""
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"unknown event: {event:.{_SHOWN}}") from error
        self._texts.append(str(text))
        return str(text)

    def _take_call(self, part: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(int(part["index"]), {"name": "", "arguments": ""})
        for key in call:
            call[key] += part["function"].get(key) or ""

    def answer(self) -> dict[str, Any]:
        """The same as the endpoint would have sent at once."""
        text = "".join(self._texts)
        if not self._is_chat:
            return {"choices": [{"text": text, "finish_reason": self._reason}]}
        calls = [{"function": call} for _, call in sorted(self._calls.items())]
        message = {"content": text, "tool_calls": calls}
        return {"choices": [{"message": message, "finish_reason": self._reason}]}
