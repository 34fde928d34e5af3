"""Turns as answers to programs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.gateway.answer import answer_of, shown_so_far
from flexmarl.actors.workflow import Turn

from .scripted_agents import CALL, TOOL


def turn(text: str, *, tools: bool = False, finish: str = "stop") -> Turn:
    return Turn("solver", text, (1,), (2,), finish_reason=finish, tools=(TOOL,) if tools else ())  # type: ignore[arg-type]


def test_an_answer_without_tools_is_its_text() -> None:
    answer = answer_of(turn(CALL), "1")
    assert (answer.content, answer.calls, answer.finish) == (CALL, (), "stop")
    assert answer_of(turn("so", finish="length"), "1").finish == "length"


def test_an_answer_has_its_calls() -> None:
    answer = answer_of(turn(CALL, tools=True), "7")
    assert answer.content == "I add."
    assert answer.finish == "tool_calls"
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("add", {"a": 1})]
    assert answer.calls[0].id and answer.calls[0].id != answer_of(turn(CALL, tools=True), "8").calls[0].id
    assert answer.message()["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_a_call_that_cannot_be_read_stays_content() -> None:
    text = '<tool_call>{"name": "add", </tool_call>'
    assert answer_of(turn(text, tools=True), "1").content == text


@pytest.mark.parametrize("text", ["<think>\nhm\n</think>\n\n3", "hm</think>3"])
def test_reasoning_is_apart_from_the_content(text: str) -> None:
    answer = answer_of(turn(text), "1")
    assert (answer.reasoning, answer.content) == ("hm", "3")


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool", "_call>", " ", "\n", "<", "a", CALL]), max_size=8
)


@given(pieces.map("".join), st.booleans())
def test_text_that_was_shown_stays(text: str, tools: bool) -> None:
    """A text that begins with reasoning, or has none: its parts only grow, up to the answer's."""
    if text.count("think>") > 2 or ("think>" in text and not text.lstrip().startswith("<think>")):
        return  # text that was shown turns into reasoning later
    answer = answer_of(turn(text, tools=tools), "1")
    before = "", ""
    for length in range(1, len(text) + 1):
        shown = shown_so_far(text[:length], [TOOL] if tools else [])
        assert shown[0].startswith(before[0])
        assert shown[1].startswith(before[1])
        before = shown
    assert answer.content.startswith(before[1])
    assert answer.reasoning.startswith(before[0])
