"""A turn as an answer to a program: its content, its reasoning, its calls of tools. Pure."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..environments.tool_calls import CALL_BEGIN, parse_tool_calls
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
    """The answer of a turn. A call that can't be read stays a part of the content; one of a tool that there is not is a
    call: the program knows what to reply."""
    reasoning, content = split_reasoning(turn.text)
    names = [tool["function"]["name"] for tool in turn.tools]
    parsed = parse_tool_calls(turn.text, names) if names else ()
    readable = [call for call in parsed if call.name]
    if len(readable) < len(parsed) or not readable:
        return Answer(answer_id, turn, content, reasoning)
    calls = tuple(
        AnsweredCall(f"call_{answer_id}_{number}", call.name, json.dumps(call.arguments, ensure_ascii=False))
        for number, call in enumerate(readable)
    )
    return Answer(answer_id, turn, content.partition(CALL_BEGIN)[0].rstrip(), reasoning, calls)


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and content of an answer's text. The template may have begun the reasoning in the prompt."""
    if THOUGHT_END in text:
        reasoning, _, content = text.partition(THOUGHT_END)
        return reasoning.removeprefix(THOUGHT_BEGIN).strip(), content.lstrip("\n")
    if text.startswith(THOUGHT_BEGIN):
        return text.removeprefix(THOUGHT_BEGIN).strip(), ""
    return "", text


def shown_so_far(text: str, tools: Collection[Any]) -> tuple[str, str]:
    """The reasoning and the content of which an unfinished answer's text leaves no doubt: what it may still turn into a
    mark or a call of a tool is left out."""
    reasoning, content = "", text
    if text.startswith(THOUGHT_BEGIN):
        thought, mark, content = text.removeprefix(THOUGHT_BEGIN).partition(THOUGHT_END)
        reasoning = thought.strip() if mark else _without_begun(thought, THOUGHT_END).lstrip()
        content = content.lstrip("\n")
    elif THOUGHT_BEGIN.startswith(text):
        return "", ""
    if tools:
        begun, mark, _ = content.partition(CALL_BEGIN)
        content = begun if mark else _without_begun(content, CALL_BEGIN)
        content = content.rstrip()  # white space before a call is not of the content
    return reasoning, content


def _without_begun(text: str, mark: str) -> str:
    """``text`` without the beginning of ``mark`` at its end."""
    most = min(len(text), len(mark) - 1)
    begun = next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - begun]
