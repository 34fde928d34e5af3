"""A turn as an answer to a program: its content, its reasoning, its calls of tools. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..chat.answer import CALL_BEGIN
from ..workflow import Turn

THOUGHT_BEGIN: Final = "<think>"
THOUGHT_END: Final = "</think>"


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call of a tool. ``arguments``: JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. ``id``: unique among all answers of the run."""

    id: str
    turn: Turn
    content: str
    reasoning: str = ""
    calls: tuple[AnsweredCall, ...] = ()

    @property
    def finish(self) -> Literal["stop", "length", "tool_calls"]:
        """The reason for its end."""
        if self.turn.finish_reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"

    def message(self) -> dict[str, Any]:
        """The message of the answer as the program is expected to send it back, in the form of OpenAI's API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
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


def answer_of(turn: Turn, answer_id: str) -> Answer:
    """The answer of a turn, without white space around its parts. A call that can't be read stays in the content;
    one of a tool that there is not is a call: the program knows what to reply. Without tools, calls are text."""
    parts = turn.parts.with_ids(answer_id)
    if not turn.tools and parts.calls:
        reasoning, content = _split_thought(turn.text)
        return Answer(answer_id, turn, content.strip(), reasoning.strip())
    calls = tuple(AnsweredCall(call.id, call.name, call.arguments) for call in parts.calls if not call.error)
    return Answer(answer_id, turn, parts.content.strip(), parts.reasoning.strip(), calls)


def shown_so_far(text: str, tools: Collection[Any]) -> tuple[str, str]:
    """The reasoning and the content of which an unfinished answer's text leaves no doubt: what it may still turn into a
    mark or a call of a tool is left out, and white space at the end of both."""
    if THOUGHT_BEGIN.startswith(text.lstrip()):
        return "", ""
    reasoning, content = _split_thought(text)
    if not content:
        reasoning = _without_begun(reasoning, THOUGHT_END)
    if tools:
        begun, mark, _ = content.partition(CALL_BEGIN)
        content = begun if mark else _without_begun(content, CALL_BEGIN)
    return reasoning.strip(), content.strip()


def _split_thought(text: str) -> tuple[str, str]:
    """The reasoning that a text begins with, and the rest."""
    if not text.lstrip().startswith(THOUGHT_BEGIN):
        return "", text
    reasoning, _, content = text.partition(THOUGHT_BEGIN)[2].partition(THOUGHT_END)
    return reasoning, content


def _without_begun(text: str, mark: str) -> str:
    """``text`` without the beginning of ``mark`` at its end."""
    most = min(len(text), len(mark) - 1)
    begun = next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - begun]
