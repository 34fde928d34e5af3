"""A turn as an answer to a program: its content, its reasoning, its calls of tools. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from ..chat.answer import CALL_BEGIN, WrittenCall
from ..workflow import Turn
from .model_call import ApiError, ModelCall

THOUGHT_BEGIN: Final = "<think>"
THOUGHT_END: Final = "</think>"


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. ``id``: unique among all answers of the run. ``stop``: the program's string that has ended it; None
    if none has."""

    id: str
    turn: Turn
    content: str
    reasoning: str = ""
    calls: tuple[WrittenCall, ...] = ()
    stop: str | None = None

    @property
    def finish(self) -> Literal["stop", "length", "tool_calls"]:
        """The reason for its end."""
        if self.turn.finish_reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"

    def message(self) -> dict[str, Any]:
        """The message of the answer as the program is expected to send it back, in the form of OpenAI's API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


def answer_of(turn: Turn, answer_id: str, call: ModelCall) -> Answer:
    """The answer of a turn, without white space around its parts. A call that can't be read stays in the content;
    one of a tool that there is not is a call: the program knows what to reply. Without tools, calls are text. An answer
    to a text is its text as it is."""
    if call.text is not None:
        content, stop = _cut(turn.text, call.stops)
        return Answer(answer_id, turn, content, stop=stop)
    parts = turn.parts.with_ids(answer_id)
    reasoning, content, calls = parts.reasoning, parts.content, parts.calls
    if not turn.tools and calls:
        reasoning, content = _split_thought(turn.text)
        calls = ()
    content, stop = _cut(content, call.stops)
    readable = tuple(call for call in calls if not call.error)
    return Answer(answer_id, turn, content.strip(), reasoning.strip(), readable, stop)


class SentText:
    """The text of a streaming answer that a program has."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._reasoning = self._content = ""

    def take_unsent(self, text: str) -> tuple[str, str]:
        """Returns the further reasoning and content of a turn's ``text`` so far, and counts them as sent. A turn
        that begins again, since its instance is lost, has none at first."""
        if self._call.text is not None:
            content, _ = _cut(text, self._call.stops)
            return self._send("", _without_begun(content, self._call.stops))
        return self._send(*shown_so_far(text, self._call.tools, self._call.stops))

    def rest(self, answer: Answer) -> tuple[str, str]:
        """Returns the parts that are left of an answer with which the sent text agrees."""
        return self._send(answer.reasoning, answer.content)

    def agreed(self, answer: Answer) -> Answer:
        """The answer as the program gets it. If text that it has turns out to be another part of the answer, such as
        reasoning that the template has begun in the prompt, it stays what it was to the program.

        Raises ApiError if the program has a text that the turn does not."""
        if answer.reasoning.startswith(self._reasoning) and answer.content.startswith(self._content):
            return answer
        content, _ = _cut(answer.turn.text, self._call.stops)
        if not self._reasoning and content.strip().startswith(self._content):
            return replace(answer, reasoning="", content=content.strip())
        problem = "the turn began again at another instance, and its text has changed: ask again"
        raise ApiError(500, problem, code="text_changed")

    def _send(self, reasoning: str, content: str) -> tuple[str, str]:
        more_reasoning = (
            reasoning.removeprefix(self._reasoning) if reasoning.startswith(self._reasoning) else ""
        )
        more_content = content.removeprefix(self._content) if content.startswith(self._content) else ""
        self._reasoning += more_reasoning
        self._content += more_content
        return more_reasoning, more_content


def shown_so_far(text: str, tools: Collection[Any], stops: Sequence[str] = ()) -> tuple[str, str]:
    """The reasoning and the content of which an unfinished answer's text leaves no doubt: what it may still turn into a
    mark, a call of a tool or a stop string is left out, and white space at the end of both."""
    if THOUGHT_BEGIN.startswith(text.lstrip()):
        return "", ""
    reasoning, content = _split_thought(text)
    if THOUGHT_END not in text:
        reasoning = _without_begun(reasoning, (THOUGHT_END,))
    content, _ = _cut(content, stops)
    marks: tuple[str, ...] = tuple(stops)
    if tools:
        content, call, _ = content.partition(CALL_BEGIN)
        marks = marks if call else (*marks, CALL_BEGIN)
    return reasoning.strip(), _without_begun(content, marks).strip()


def _split_thought(text: str) -> tuple[str, str]:
    """The reasoning that a text begins with, and the rest."""
    if not text.lstrip().startswith(THOUGHT_BEGIN):
        return "", text
    reasoning, _, content = text.partition(THOUGHT_BEGIN)[2].partition(THOUGHT_END)
    return reasoning, content


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """``text`` up to the first of the stop strings, and which one it is: the turn has it, the APIs do not show it."""
    places = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not places:
        return text, None
    place, stop = min(places)
    return text[:place], stop


def _without_begun(text: str, marks: Sequence[str]) -> str:
    """``text`` without the beginning of a mark at its end."""
    begun = 0
    for mark in marks:
        most = min(len(text), len(mark) - 1)
        begun = max(begun, next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0))
    return text[: len(text) - begun]
