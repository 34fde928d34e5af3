"""OpenAI's chat API: ``/v1/chat/completions``."""

import json
import time
from collections.abc import Sequence
from typing import Any, Final

from ..answer import Answer
from ..model_call import ApiError, Message, ModelCall
from .api import AnswerEvents, Api, Body
from .openai_errors import openai_failure
from .reading import checked_messages, checked_tools, choices_of, list_of, refuse, text_of_parts

_OPTIONS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
"""The keys of a body that are options of a turn, with the names of these."""


class OpenaiChat(Api):
    """See https://platform.openai.com/docs/api-reference/chat."""

    path = "/chat/completions"

    def read(self, body: Body) -> ModelCall:
        refuse(body, "response_format", ({"type": "text"},), "answers have no other form than text")
        refuse(body, "tool_choice", ("auto", "none"), "nothing forces a model to call a tool")
        tools = [] if body.get("tool_choice") == "none" else list_of(body, "tools")
        messages = [_message(number, message) for number, message in enumerate(list_of(body, "messages"))]
        if not messages:
            raise ApiError(400, "messages is empty", parameter="messages")
        stream_options = body.get("stream_options") or {}
        return ModelCall(
            str(body.get("model")),
            checked_messages(messages),
            checked_tools(tools),
            {name: body[key] for key, name in _OPTIONS.items() if body.get(key) is not None},
            choices_of(body),
            bool(body.get("stream")),
            {"logprobs": bool(body.get("logprobs")), "usage": bool(stream_options.get("include_usage"))},
        )

    def answer(self, call: ModelCall, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{answers[0].id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.model,
            "choices": [
                {
                    "index": number,
                    "message": _answer_message(answer),
                    "finish_reason": answer.finish,
                    "logprobs": _logprobs(answer) if call.details["logprobs"] else None,
                }
                for number, answer in enumerate(answers)
            ],
            "usage": usage(answers),
        }

    def events(self, call: ModelCall) -> AnswerEvents:
        return _ChatEvents(call)

    def failure(self, error: ApiError) -> dict[str, Any]:
        return openai_failure(error)


def _message(number: int, message: Message) -> Message:
    """A message of the body as templates take it."""
    where = f"messages[{number}]"
    role = message.get("role")
    kept: Message = {"role": "system" if role == "developer" else role}
    kept["content"] = text_of_parts(message.get("content"), f"{where}.content")
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(where, call) for call in calls]
    kept |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    return kept


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where}.tool_calls has one without a function's name", parameter="messages")
    arguments = function.get("arguments") or "{}"
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _answer_message(answer: Answer) -> Message:
    message = answer.message()
    message["content"] = message["content"] or None
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return {**message, "refusal": None}


def _logprobs(answer: Answer) -> dict[str, Any]:
    """The log-probabilities of the answer's tokens. A token's text is its number: a worker has no tokenizer."""
    pairs = zip(answer.turn.tokens, answer.turn.logprobs, strict=False)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ],
        "refusal": None,
    }


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """The tokens of a request, in the form of OpenAI's API."""
    prompt = len(answers[0].turn.prompt_tokens)
    completion = sum(len(answer.turn.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class _ChatEvents(AnswerEvents):
    """The id of the answer is not known before its end: events have one of their own."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._sent = {number: ["", ""] for number in range(call.choices)}
        self._created = int(time.time())
        self._id = f"chatcmpl-{id(self):x}{time.monotonic_ns():x}"

    def begin(self) -> bytes:
        return b"".join(
            self._chunk(number, {"role": "assistant", "content": ""}) for number in range(self._call.choices)
        )

    def text(self, choice: int, reasoning: str, content: str) -> bytes:
        delta = {"reasoning_content": reasoning} if reasoning else {}
        return self._chunk(choice, {**delta, **({"content": content} if content else {})})

    def end(self, answers: Sequence[Answer]) -> bytes:
        events = []
        for number, answer in enumerate(answers):
            calls = answer.message().get("tool_calls") or ()
            if calls:
                listed = [{"index": place, **call} for place, call in enumerate(calls)]
                events.append(self._chunk(number, {"tool_calls": listed}))
            events.append(self._chunk(number, {}, answer.finish))
        if self._call.details["usage"]:
            events.append(self._event({"choices": [], "usage": usage(answers)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + json.dumps(openai_failure(error)).encode() + b"\n\n"

    def _chunk(self, choice: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        return self._event({"choices": [{"index": choice, "delta": delta, "finish_reason": finish}]})

    def _event(self, rest: dict[str, Any]) -> bytes:
        head = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._call.model,
        }
        return b"data: " + json.dumps({**head, **rest}).encode() + b"\n\n"
