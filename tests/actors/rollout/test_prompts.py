"""Prompts as workflows write them: text, turns and messages."""

from typing import Any

import pytest

from flexmarl.actors.environments.tool_calls import tool_schema
from flexmarl.actors.messages import Chat
from flexmarl.actors.rollout.prompts import Segments, prompt_parts, segments_and_chat
from flexmarl.actors.rollout.turn_options import NO_OPTIONS, TurnOptions
from flexmarl.actors.workflow import Turn

USER = {"role": "user", "content": "1+1?"}
NEXT = {"role": "user", "content": "Sure?"}
ANSWER = {"role": "assistant", "content": "2"}
TEXT_TURN = Turn("solver", "2", (1, 2), (3, 4), "1:q_0_0")
CHAT_TURN = Turn("solver", "2", (1, 2), (3, 4), "1:q_0_0", conversation=(USER, ANSWER))


async def add(a: int) -> int:
    return a


def made(prompt: Any, options: TurnOptions = NO_OPTIONS) -> tuple[Segments, Chat | None]:
    return segments_and_chat(prompt_parts(prompt), options)


def test_text_and_turns_are_segments() -> None:
    assert made("2+2") == (("2+2",), None)
    assert made(TEXT_TURN) == (((1, 2, 3, 4),), None)
    assert made([CHAT_TURN, "more"]) == (((1, 2, 3, 4), "more"), None)


def test_messages_are_a_chat() -> None:
    assert made([USER]) == ((), Chat((USER,)))
    tools = (tool_schema(add),)
    assert made([USER], TurnOptions(tools=[add])) == ((), Chat((USER,), tools))
    assert made([USER], TurnOptions(tools=[*tools])) == ((), Chat((USER,), tools)), "a schema is a tool too"


def test_a_turn_among_messages_is_its_conversation() -> None:
    expected = ((1, 2), (3, 4)), Chat((USER, ANSWER, NEXT), answered=2)
    assert made([CHAT_TURN, NEXT]) == expected
    assert made([USER, CHAT_TURN, NEXT]) == expected, "its own messages may stand before it"
    second = Turn("solver", "4", (1, 2, 3, 4, 5), (6,), "1:q_1_0", conversation=(USER, ANSWER, NEXT, ANSWER))
    assert made([USER, CHAT_TURN, NEXT, second, USER]) == (
        ((1, 2, 3, 4, 5), (6,)),
        Chat((USER, ANSWER, NEXT, ANSWER, USER), answered=4),
    )


def test_retokenize_makes_text_of_turns() -> None:
    again = TurnOptions(retokenize=True)
    assert made([CHAT_TURN, NEXT], again) == ((), Chat((USER, ANSWER, NEXT)))
    assert made([NEXT, CHAT_TURN, NEXT], again) == ((), Chat((NEXT, ANSWER, NEXT)))


@pytest.mark.parametrize(
    ("prompt", "options", "problem"),
    [
        ([], NO_OPTIONS, "the prompt is an empty list"),
        (USER, NO_OPTIONS, "the prompt is one message, needs a list"),
        ([USER, "text"], NO_OPTIONS, "the prompt has text and messages"),
        (["text", 3], NO_OPTIONS, "part 1 of the prompt is int"),
        (3, NO_OPTIONS, "the prompt is int, needs a string, a Turn or a list of them or of messages$"),
        ([USER, {"content": "x"}], NO_OPTIONS, r"messages\[1\] has no role"),
        ([TEXT_TURN, USER], NO_OPTIONS, "turn 1:q_0_0 was generated from text"),
        ([NEXT, CHAT_TURN, USER], NO_OPTIONS, "turn 1:q_0_0 was generated from other messages"),
        ([CHAT_TURN, NEXT], TurnOptions(tools=[add]), "turn 1:q_0_0 was generated with other tools"),
        ("text", TurnOptions(tools=[add]), "tools is for a prompt of messages"),
        ("text", TurnOptions(retokenize=True), "retokenize is for a prompt of messages"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, options: TurnOptions, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        made(prompt, options)


async def test_a_turn_that_was_not_awaited_is_no_prompt() -> None:
    async def turn() -> None: ...

    coroutine: Any = turn()
    for prompt in (coroutine, ["text", coroutine]):
        with pytest.raises(ValueError, match="is coroutine, needs .*; is `await` missing"):
            made(prompt)
    await coroutine
