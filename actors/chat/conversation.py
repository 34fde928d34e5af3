"""Supervised examples as messages: the tokens that each answer follows, and the answer's own.

A conversation of several answers is as many rows. Each has the prompt that ``generate`` would make for the turn, from
the tokens of the answers before it: what is trained here is what reinforcement learning continues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.base.texts import half_problem
from ..environments.tool_calls import tool_schema
from ..errors import InvalidRequest
from ..messages import Chat
from .chat_prompt import chat_prompt
from .checked_message import checked_message
from .text_codec import TextCodec

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt tokens, completion tokens."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """``messages`` and the schemas of ``tools``, as chat templates take them. One message at least is an answer."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


def conversation_of(example: object) -> Conversation:
    """From a list of messages, or from ``{"messages": [...], "tools": [...]}`` with tools as ``generate`` takes them.
    Raises ValueError, which names the message or the tool."""
    listed: Any = example
    tools: Any = ()
    if isinstance(example, Mapping):
        if unknown := [key for key in example if key not in ("messages", "tools")]:
            raise ValueError(f"the unknown key {unknown[0]!r}; known are: messages, tools")
        listed, tools = example.get("messages"), example.get("tools") or ()
    if not _is_list(listed) or not all(isinstance(message, Mapping) for message in listed):
        raise ValueError("something else than a list of messages")
    if not _is_list(tools):
        raise ValueError("tools of another kind than a list")
    messages = tuple(checked_message(number, message) for number, message in enumerate(listed))
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message of the role 'assistant', of which it could learn")
    if messages[0]["role"] == "assistant":
        raise ValueError("an answer as the first message, which follows no prompt")
    conversation = Conversation(messages, tuple(map(tool_schema, tools)))
    if problem := half_problem({"messages": messages, "tools": conversation.tools}):
        raise ValueError(problem)
    return conversation


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def conversation_rows(conversation: Conversation, codec: TextCodec, end: int) -> list[Row]:
    """A row for each answer, which ends with the token ``end`` or the one that its family has. Raises ValueError for
    messages that ``chat_prompt`` refuses, and for an answer whose end is not to be found."""
    rows: list[Row] = []
    messages, tools = conversation.messages, conversation.tools
    before: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    answered = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            chat = Chat(messages[:number], tools, answered)
            before = chat_prompt("", chat, before, answer, codec)
        except InvalidRequest as error:
            raise ValueError(error.problem) from error
        answer = _answer(messages[: number + 1], tools, codec, end)
        rows.append((before, answer))
        answered = number + 1
    return rows


def _answer(
    messages: Sequence[dict[str, Any]], tools: tuple[dict[str, Any], ...], codec: TextCodec, end: int
) -> tuple[int, ...]:
    """The tokens of the last message as the template writes it, with its calls of tools, up to ``end``."""
    if (tokens := codec.answer_tokens(messages, tools)) is not None:
        return tokens
    *before, message = messages
    begun, written = codec.chat_text(before, tools), codec.chat_text(messages, tools)
    which = f"messages[{len(before)}]"
    if not written.startswith(begun):
        raise ValueError(f"the chat template of {codec.name} changes the messages before {which} by it")
    rest = written[len(begun) :]
    tokens = codec.encode(rest, False)
    if end in tokens:
        return tokens[: tokens.index(end) + 1]
    # A template that ends no answer: the engine's end of a turn is the token alone.
    content = (message["content"] or "").strip()
    if message.get("tool_calls") or not rest.strip().startswith(content):
        raise ValueError(
            f"the chat template of {codec.name} ends {which} without the tokenizer's end token: write the answer, "
            "with its calls of tools, as the content"
        )
    return (*codec.encode(message["content"], False), end)
