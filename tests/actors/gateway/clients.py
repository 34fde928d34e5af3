"""The common parts of the episodes of real clients: a server with agents that answer from a list."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from flexmarl.actors.gateway.gateway import Gateway, open_gateway
from flexmarl.actors.workflow import Turn

from .scripted_agents import ScriptedAgent

QUESTION = "What is 1 + 2?"
ADDS = 'I add. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ADDS_AGAIN = (
    '<think>Again, to be sure.</think><tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
)
RESULT = "It is 3."
EPISODE = (ADDS, ADDS_AGAIN, RESULT)
"""The answers of an episode of three turns: two calls of ``add``, the second one after a thought, and a text."""

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


@asynccontextmanager
async def scripted(*answers: str | Exception) -> AsyncIterator[tuple[Gateway, ScriptedAgent]]:
    """A gateway whose model ``solver`` gives these answers."""
    solver = ScriptedAgent("solver", *answers)
    async with open_gateway({"solver": solver}, models={"alias": "solver"}) as gateway:
        yield gateway, solver


def check_episode(gateway: Gateway, answers: Sequence[str] = EPISODE) -> None:
    """The turns have the tokens that were generated, and each one continues the one before it."""
    assert [turn.text for turn in gateway.turns] == list(answers)
    assert [turn.tokens for turn in gateway.turns] == [tuple(map(ord, answer)) for answer in answers]
    before: Turn | None = None
    for turn in gateway.turns:
        if before is not None:
            tokens = before.prompt_tokens + before.tokens
            assert turn.prompt_tokens[: len(tokens)] == tokens
            assert len(turn.prompt_tokens) > len(tokens)
        before = turn
    assert dict(gateway.counts) == {"begun": 1, "merged": len(answers) - 1}
