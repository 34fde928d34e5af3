"""OpenAI's API of texts: ``/v1/completions``."""

import time
from collections.abc import Sequence
from typing import Any

from ..answer import Answer
from ..model_call import ApiError, ModelCall
from .api import AnswerEvents, Api, Body, Earlier, event
from .openai_common import openai_failure, options_of, token_name, usage
from .reading import choices_of, mapping_of, model_of, refuse, refuse_other


class OpenaiCompletions(Api):
    """See https://platform.openai.com/docs/api-reference/completions."""

    path = "/completions"

    def read(self, body: Body, earlier: Earlier) -> ModelCall:
        refuse(body, "echo", "an answer has no tokens of its prompt")
        refuse(body, "suffix", "agents write forward alone")
        refuse_other(body, "best_of", (1,), "all answers are given: pass n")
        logprobs = body.get("logprobs")
        if isinstance(logprobs, int) and logprobs > 1:
            raise ApiError(
                400, "logprobs: only those of the drawn tokens are known: pass 1", parameter="logprobs"
            )
        return ModelCall(
            model_of(body),
            (),
            (),
            options_of(body),
            choices_of(body),
            bool(body.get("stream")),
            {
                "logprobs": logprobs is not None and logprobs is not False,
                "usage": bool(mapping_of(body, "stream_options").get("include_usage")),
            },
            text=_prompt(body.get("prompt")),
        )

    def answer(self, call: ModelCall, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            _choice(number, answer.content, answer.finish, _logprobs(call, answer))
            for number, answer in enumerate(answers)
        ]
        return {**_head(call, int(time.time())), "choices": choices, "usage": usage(answers)}

    def events(self, call: ModelCall) -> AnswerEvents:
        return _Events(call)

    def failure(self, error: ApiError) -> dict[str, Any]:
        return openai_failure(error)


def _prompt(prompt: Any) -> str:
    """Raises ApiError."""
    match prompt:
        case str() if prompt:
            return prompt
        case [str(text)] if text:
            return text
        case [str(), *_]:
            raise ApiError(
                400,
                "prompt has several texts: send a request for each",
                code="unsupported",
                parameter="prompt",
            )
        case [*_] if prompt:
            raise ApiError(400, "prompt is tokens, needs text", code="unsupported", parameter="prompt")
    raise ApiError(400, "prompt is empty, needs text", parameter="prompt")


def _head(call: ModelCall, created: int) -> dict[str, Any]:
    return {"id": f"cmpl-{call.id}", "object": "text_completion", "created": created, "model": call.model}


def _choice(
    number: int, text: str, finish: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": number, "text": text, "finish_reason": finish, "logprobs": logprobs}


def _logprobs(call: ModelCall, answer: Answer) -> dict[str, Any] | None:
    if not call.details["logprobs"]:
        return None
    return {
        "tokens": [token_name(token) for token in answer.turn.tokens],
        "token_logprobs": list(answer.turn.logprobs),
        "top_logprobs": None,
        "text_offset": None,
    }


class _Events(AnswerEvents):
    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._head = _head(call, int(time.time()))

    def begin(self) -> bytes:
        return b""

    def text(self, choice: int, reasoning: str, content: str) -> bytes:
        return self._event(_choice(choice, content))

    def end(self, answers: Sequence[Answer]) -> bytes:
        events = [
            self._event(_choice(number, "", answer.finish, _logprobs(self._call, answer)))
            for number, answer in enumerate(answers)
        ]
        if self._call.details["usage"]:
            events.append(event({**self._head, "choices": [], "usage": usage(answers)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def failure(self, error: ApiError) -> bytes:
        return event(openai_failure(error))

    def _event(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head, "choices": [choice]})
