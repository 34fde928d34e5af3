"""Responses of OpenAI's API, whole and as events. Pure."""

import time
from collections.abc import Sequence
from typing import Any

from ...chat.answer import WrittenCall
from ..answer import Answer
from ..model_call import ApiError, ModelCall
from .api import AnswerEvents, event

Item = dict[str, Any]


def response(call: ModelCall, answer: Answer, created: float | None = None) -> Item:
    """A response that has ended."""
    output: list[Item] = []
    if answer.reasoning:
        output.append(_reasoning(call, len(output), answer.reasoning))
    if answer.content or not answer.calls:
        output.append(_message(call, len(output), answer.content))
    for tool_call in answer.calls:
        output.append(_function_call(call, len(output), tool_call))
    ended = _base(call, created or time.time(), "completed", output)
    if answer.finish == "length":
        ended |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    prompt, completion = len(answer.turn.prompt_tokens), len(answer.turn.tokens)
    return ended | {
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
    }


def _base(call: ModelCall, created: float, status: str, output: list[Item]) -> Item:
    options, details = call.options, call.details
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": details["instructions"],
        "max_output_tokens": options.get("max_new_tokens"),
        "metadata": details["metadata"],
        "model": call.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": details["previous_response_id"],
        "reasoning": {"effort": None, "summary": None},
        "store": details["store"],
        "temperature": options.get("temperature"),
        "text": {"format": details["form"]},
        "tool_choice": details["tool_choice"],
        "tools": details["tools"],
        "top_p": options.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _reasoning(call: ModelCall, number: int, text: str | None) -> Item:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    item = {"id": f"rs_{call.id}_{number}", "type": "reasoning", "summary": [], "content": content}
    return item | {"status": "in_progress" if text is None else "completed"}


def _message(call: ModelCall, number: int, text: str | None) -> Item:
    item = {"id": f"msg_{call.id}_{number}", "type": "message", "role": "assistant"}
    content = [] if text is None else [_part(text)]
    return item | {"status": "in_progress" if text is None else "completed", "content": content}


def _part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(call: ModelCall, number: int, tool_call: WrittenCall, *, begins: bool = False) -> Item:
    return {
        "id": f"fc_{call.id}_{number}",
        "type": "function_call",
        "call_id": tool_call.id,
        "name": tool_call.name,
        "arguments": "" if begins else tool_call.arguments,
        "status": "in_progress" if begins else "completed",
    }


class ResponseEvents(AnswerEvents):
    """The events of a response that streams. ``_item``: the open item, whose text is ``_text``; None if there is
    none."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._created = time.time()
        self._sequence = 0
        self._number = 0
        self._item: Item | None = None
        self._text = ""

    def begin(self) -> bytes:
        begun = _base(self._call, self._created, "in_progress", [])
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def text(self, choice: int, reasoning: str, content: str) -> bytes:
        events = b""
        if reasoning:
            events += self._more("reasoning", reasoning)
        if content:
            events += self._more("message", content)
        return events

    def end(self, answers: Sequence[Answer]) -> bytes:
        answer = answers[0]
        events = self._close()
        if not answer.content and not answer.calls:  # an answer has an item of text
            events += self._open("message") + self._close()
        for tool_call in answer.calls:
            events += self._function_call(tool_call)
        ended = response(self._call, answer, self._created)
        return events + self._event(f"response.{ended['status']}", response=ended)

    def failure(self, error: ApiError) -> bytes:
        failed = _base(self._call, self._created, "failed", [])
        code = "server_error" if error.status >= 500 else error.code
        failed["error"] = {"code": code, "message": error.problem}
        return self._event("response.failed", response=failed)

    def _more(self, kind: str, text: str) -> bytes:
        events = b""
        if self._item is None or self._item["type"] != kind:
            events += self._close() + self._open(kind)
        self._text += text
        if kind == "reasoning":
            return events + self._of_item("response.reasoning_text.delta", content_index=0, delta=text)
        return events + self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _open(self, kind: str) -> bytes:
        make = _reasoning if kind == "reasoning" else _message
        self._item, self._text = make(self._call, self._number, None), ""
        events = self._event("response.output_item.added", output_index=self._number, item=self._item)
        if kind == "message":
            events += self._of_item("response.content_part.added", content_index=0, part=_part(""))
        return events

    def _close(self) -> bytes:
        if self._item is None:
            return b""
        if self._item["type"] == "reasoning":
            item = _reasoning(self._call, self._number, self._text)
            events = self._of_item("response.reasoning_text.done", content_index=0, text=self._text)
        else:
            item = _message(self._call, self._number, self._text)
            events = self._of_item("response.output_text.done", content_index=0, text=self._text, logprobs=[])
            events += self._of_item("response.content_part.done", content_index=0, part=_part(self._text))
        events += self._event("response.output_item.done", output_index=self._number, item=item)
        self._item = None
        self._number += 1
        return events

    def _function_call(self, tool_call: WrittenCall) -> bytes:
        self._item = _function_call(self._call, self._number, tool_call, begins=True)
        events = self._event("response.output_item.added", output_index=self._number, item=self._item)
        events += self._of_item("response.function_call_arguments.delta", delta=tool_call.arguments)
        events += self._of_item(
            "response.function_call_arguments.done", name=tool_call.name, arguments=tool_call.arguments
        )
        item = _function_call(self._call, self._number, tool_call)
        events += self._event("response.output_item.done", output_index=self._number, item=item)
        self._item = None
        self._number += 1
        return events

    def _of_item(self, kind: str, **rest: Any) -> bytes:
        assert self._item is not None, "it is open"
        return self._event(kind, item_id=self._item["id"], output_index=self._number, **rest)

    def _event(self, kind: str, **rest: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **rest}, kind)
