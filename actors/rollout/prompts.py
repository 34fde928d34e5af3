"""The prompt of a turn as a workflow writes it: text and turns, or messages and turns. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..chat.checked_message import checked_message
from ..environments.tool_calls import tool_schema
from ..messages import Chat
from ..recipe.missing_await import await_hint
from ..workflow import Prompt, Turn
from .turn_options import TurnOptions

Segments = tuple[str | tuple[int, ...], ...]


def prompt_parts(prompt: Prompt) -> tuple[str | Turn | Mapping[str, Any], ...]:
    """Raises ValueError for an empty prompt, and for one that mixes text and messages."""
    if isinstance(prompt, str | Turn):
        return (prompt,)
    if isinstance(prompt, Mapping):
        raise ValueError("the prompt is one message, needs a list of messages")
    if not isinstance(prompt, Iterable):
        raise ValueError(
            f"the prompt is {type(prompt).__name__}, needs a string, a Turn or a list of them or of messages"
            f"{await_hint(prompt)}"
        )
    parts = tuple(prompt)
    if not parts:
        raise ValueError("the prompt is an empty list")
    kinds = {_kind(number, part) for number, part in enumerate(parts)} - {"turn"}
    if len(kinds) > 1:
        raise ValueError("the prompt has text and messages, needs one kind of both, besides turns")
    return parts


def _kind(number: int, part: object) -> str:
    if isinstance(part, str):
        return "text"
    if isinstance(part, Mapping):
        return "messages"
    if isinstance(part, Turn):
        return "turn"
    raise ValueError(
        f"part {number} of the prompt is {type(part).__name__}, needs a string, a message or a Turn{await_hint(part)}"
    )


def segments_and_chat(
    parts: Sequence[str | Turn | Mapping[str, Any]], options: TurnOptions
) -> tuple[Segments, Chat | None]:
    """The prompt and the chat of a request. Raises ValueError for messages that are invalid, or that are not those of
    the turns among them."""
    if all(isinstance(part, str | Turn) for part in parts):
        if options.tools or options.retokenize:
            name = "tools" if options.tools else "retokenize"
            raise ValueError(f"{name} is for a prompt of messages, this one is text")
        segments = (
            part.prompt_tokens + part.tokens if isinstance(part, Turn) else part
            for part in parts
            if not isinstance(part, Mapping)
        )
        return tuple(segments), None
    tools = tuple(tool_schema(tool) for tool in options.tools)
    conversation = _Conversation(tools, options.retokenize)
    for part in parts:
        if isinstance(part, Turn):
            conversation.add_turn(part)
        elif isinstance(part, Mapping):
            conversation.messages.append(checked_message(len(conversation.messages), part))
    return conversation.prefix, Chat(tuple(conversation.messages), tools, conversation.answered)


class _Conversation:
    """The messages so far. ``prefix``: the prompt and the answer that the first ``answered`` are, as tokens."""

    def __init__(self, tools: tuple[dict[str, Any], ...], retokenize: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self.answered = 0
        self.prefix: tuple[tuple[int, ...], ...] = ()
        self._tools = tools
        self._retokenize = retokenize

    def add_turn(self, turn: Turn) -> None:
        """Adds an answer; the first one with the messages before it."""
        *before, answer = turn.conversation or ({},)
        if not answer:
            raise ValueError(
                f"turn {turn.sample_id} was generated from text, and can't be continued by messages: pass its text as "
                "the content of one"
            )
        if self._retokenize:
            self.messages = [*(self.messages or before), answer]
            return
        if self.messages and self.messages != before:
            raise ValueError(
                f"turn {turn.sample_id} was generated from other messages than those before it: leave them out "
                "([turn, ...] has them already), or pass retokenize=True"
            )
        if self._tools != turn.tools:
            raise ValueError(
                f"turn {turn.sample_id} was generated with other tools: pass the same, or retokenize=True"
            )
        self.messages = [*before, answer]
        self.answered = len(self.messages)
        self.prefix = (turn.prompt_tokens, turn.tokens)
