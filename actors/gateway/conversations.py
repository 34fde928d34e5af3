"""The conversations of a session: which turn a request continues. Pure.

A program sends its whole conversation with each request. Those messages that are the messages of an earlier request and
its answer keep that turn's tokens; the rest is new:

    request 1    system user                          -> turn 1
    request 2    system user assistant tool           -> turn 2 continues turn 1 with [tool]
    request 3    system user assistant' tool          -> begins again: the session has not given assistant'

Two messages are the same if role, text, calls of tools and the call that they answer are: programs leave out other
keys, such as the reasoning.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import xxhash

from ..workflow import Turn
from .model_call import Message

Kind = Literal["begun", "merged", "branched"]
"""``begun``: a new conversation. ``merged``: the first turn that continues an earlier one. ``branched``: a further one
that continues it, and a conversation with answers that the session has not given."""

_SHOWN: Final = 60


@dataclass(frozen=True, slots=True)
class Place:
    """The turn that a request continues by ``messages``, or by a text. Without a turn, they are the whole conversation.
    ``difference``: from an earlier conversation that it may be meant to continue; empty if there is none."""

    turn: Turn | None
    messages: tuple[str | Message, ...]
    difference: str = ""


@dataclass(slots=True)
class _Node:
    """``conversation``: the messages up to the answer, as the program has them. ``next_turns``: that continue it."""

    turn: Turn
    conversation: tuple[Message, ...]
    parent: "_Node | None"
    next_turns: int = 0


@dataclass(slots=True)
class _Text:
    """``text``: of the prompt and the answer."""

    turn: Turn
    text: str
    parent: "_Text | None"
    next_turns: int = 0


class Conversations:
    """The turns of a session that have ended, by agent, tools and messages."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, _Node] = {}
        self._nodes: dict[str, list[_Node]] = {}
        self._texts: dict[str, list[_Text]] = {}

    def place(
        self,
        agent: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        text: str | None = None,
    ) -> Place:
        """The place of a request with these messages, or with a ``text``. The longest known conversation counts."""
        if text is not None:
            before = self._longest_text(agent, text)
            return Place(None, (text,)) if before is None else Place(before.turn, (text[len(before.text) :],))
        number, node = self._longest(agent, messages, tools)
        if node is not None:
            return Place(node.turn, tuple(messages[number:]))
        difference = self._difference(agent, messages) if self._is_rewritten(agent, messages) else ""
        return Place(None, tuple(messages), difference)

    def add(
        self,
        agent: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        answer: Message,
        turn: Turn,
        text: str | None = None,
        *,
        begins_again: bool = False,
    ) -> Kind:
        """Adds a turn: ``answer`` as the program gets it. ``begins_again``: the turn has none of the tokens of those
        before it, though its messages continue them. Returns its kind."""
        if text is not None:
            return self._add_text(agent, text, turn)
        _, parent = (0, None) if begins_again else self._longest(agent, messages, tools)
        if parent is not None:
            kind: Kind = "branched" if parent.next_turns else "merged"
            parent.next_turns += 1
        else:
            kind = "branched" if self._is_rewritten(agent, messages) else "begun"
        conversation = (*messages, answer)
        node = _Node(turn, conversation, parent)
        *_, digest = _digests(agent, conversation, tools)
        self._by_digest[digest] = node
        self._nodes.setdefault(agent, []).append(node)
        return kind

    def main_turns(self, agent: str) -> list[Turn]:
        """The longest chain of the agent's turns that continue each other; the first one of equally long ones."""
        chains = [_chain(node) for node in (*self._nodes.get(agent, ()), *self._texts.get(agent, ()))]
        return max(chains, key=len, default=[])

    def _add_text(self, agent: str, text: str, turn: Turn) -> Kind:
        parent = self._longest_text(agent, text)
        self._texts.setdefault(agent, []).append(_Text(turn, text + turn.text, parent))
        if parent is None:
            return "begun"
        parent.next_turns += 1
        return "merged" if parent.next_turns == 1 else "branched"

    def _longest_text(self, agent: str, text: str) -> "_Text | None":
        """The turn with the longest text that ``text`` continues: one with something behind it."""
        beginnings = [
            node
            for node in self._texts.get(agent, ())
            if len(node.text) < len(text) and text.startswith(node.text)
        ]
        return max(beginnings, key=lambda node: len(node.text), default=None)

    def _is_rewritten(self, agent: str, messages: Sequence[Message]) -> bool:
        """True if ``messages``, which no known conversation begins, have answers all the same."""
        return agent in self._nodes and any(message["role"] == "assistant" for message in messages)

    def _longest(
        self, agent: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, _Node | None]:
        """The number of messages of the longest known conversation that ``messages`` begin with, and its turn."""
        longest: tuple[int, _Node | None] = 0, None
        if agent not in self._nodes:
            return longest
        for number, digest in enumerate(_digests(agent, messages, tools)):
            if (node := self._by_digest.get(digest)) is not None:
                longest = number, node
        return longest

    def _difference(self, agent: str, messages: Sequence[Message]) -> str:
        """The first difference from the known conversation that agrees with ``messages`` for longest."""
        same, nearest = -1, self._nodes[agent][0]
        for node in self._nodes[agent]:
            if (number := _equal_messages(messages, node.conversation)) >= same:
                same, nearest = number, node
        if same == len(nearest.conversation):
            return "its tools are others"
        if same == len(messages):
            return f"it ends before message {same} of an earlier one"
        return f"message {same} was {_excerpt(nearest.conversation[same])}, is {_excerpt(messages[same])}"


def _chain(node: _Node | _Text) -> list[Turn]:
    """The turns up to that of ``node``."""
    turns = [node.turn]
    while node.parent is not None:
        node = node.parent
        turns.append(node.turn)
    return turns[::-1]


def _equal_messages(first: Sequence[Message], second: Sequence[Message]) -> int:
    """The number of messages that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if _text(a) != _text(b)), min(len(first), len(second)))


def _digests(agent: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """The digest of each beginning: of no message, of one, ..., of all."""
    digest = xxhash.xxh3_128(agent.encode())
    for tool in tools:
        digest.update(json.dumps(tool, sort_keys=True).encode())
    digests = [digest.digest()]
    for message in messages:
        digest.update(_text(message).encode())
        digests.append(digest.digest())
    return digests


def _text(message: Message) -> str:
    """All of a message that counts, as one text."""
    calls = [
        (call.get("id"), call["function"]["name"], _canonical(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps([message["role"], message.get("content") or "", calls, message.get("tool_call_id")])


def _canonical(arguments: Any) -> Any:
    """The arguments of a call as data: programs write JSON in other forms."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (TypeError, ValueError):
        return arguments


def _excerpt(message: Message) -> str:
    text = f"{message['role']}: {message.get('content') or message.get('tool_calls')}"
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
