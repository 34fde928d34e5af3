"""OpenAI's chat API: ``/v1/chat/completions``."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..answer import Answer
from ..model_call import ApiError, Message, ModelCall
from .api import AnswerEvents, Api, Body, Earlier, event
from .openai_common import forced_call, openai_failure, options_of, token_name, usage
from .reading import (
    checked_messages,
    checked_tools,
    choices_of,
    json_form,
    list_of,
    mapping_of,
    model_of,
    refuse,
    refuse_other,
    text_of_parts,
    tool_call,
)


def _form(body: Body) -> Mapping[str, Any]:
    """The form of the answer, as the API of responses has it: without a level for its name and schema."""
    form = mapping_of(body, "response_format")
    return {"type": "text", **form, **mapping_of(form, "json_schema")}


class OpenaiChat(Api):
    """See https://platform.openai.com/docs/api-reference/chat."""

    path = "/chat/completions"

    def read(self, body: Body, earlier: Earlier) -> ModelCall:
        refuse_other(body, "modalities", (["text"],), "agents write text alone")
        for key in ("functions", "function_call"):
            refuse(body, key, "the form before tools is not served: pass tools")
        choice = body.get("tool_choice")
        if isinstance(choice, Mapping) and isinstance(function := choice.get("function"), Mapping):
            choice = {**choice, "name": function.get("name")}  # as the API of responses has it
        tools = [] if choice == "none" else list_of(body, "tools")
        messages = [_message(number, message) for number, message in enumerate(list_of(body, "messages"))]
        return ModelCall(
            model_of(body),
            checked_messages(messages),
            checked_tools(tools),
            {**options_of(body), **forced_call(choice), **json_form(_form(body), "response_format")},
            choices_of(body),
            bool(body.get("stream")),
            {
                "logprobs": bool(body.get("logprobs")),
                "usage": bool(mapping_of(body, "stream_options").get("include_usage")),
            },
        )

    def answer(self, call: ModelCall, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{call.id}",
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
    # A history that begins again is tokenised with it: some templates keep it behind the last question.
    if reasoning := text_of_parts(message.get("reasoning_content"), f"{where}.reasoning_content"):
        kept["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(where, call) for call in calls]
    kept |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    return kept


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ApiError(400, f"{where}.tool_calls has one that is not of a function", parameter="messages")
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"))


def _answer_message(answer: Answer) -> Message:
    message = answer.message()
    message["content"] = message["content"] or None
    return {**message, "refusal": None}


def _logprobs(answer: Answer) -> dict[str, Any]:
    """The log-probabilities of the answer's tokens. A token's text is its number: a worker has no tokenizer."""
    pairs = zip(answer.turn.tokens, answer.turn.logprobs, strict=False)
    return {
        "content": [
            {"token": token_name(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ],
        "refusal": None,
    }


class _ChatEvents(AnswerEvents):
    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._created = int(time.time())

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
            logprobs = _logprobs(answer) if self._call.details["logprobs"] else None
            events.append(self._chunk(number, {}, answer.finish, logprobs))
        if self._call.details["usage"]:
            events.append(self._event({"choices": [], "usage": usage(answers)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def failure(self, error: ApiError) -> bytes:
        return event(openai_failure(error))

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """``logprobs``: of the whole answer, in its last chunk: text comes without its tokens."""
        listed = {"index": choice, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return self._event({"choices": [listed]})

    def _event(self, rest: dict[str, Any]) -> bytes:
        head = {
            "id": f"chatcmpl-{self._call.id}",
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._call.model,
        }
        return event({**head, **rest})
