"""Turns as answers to programs."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.gateway.answer import Answer, SentText, answer_of, shown_so_far
from flexmarl.actors.gateway.model_call import ApiError, ModelCall
from flexmarl.actors.workflow import Turn

from .scripted_agents import CALL, TOOL


def turn(text: str, *, tools: bool = False, finish: str = "stop") -> Turn:
    return Turn("solver", text, (1,), (2,), finish_reason=finish, tools=(TOOL,) if tools else ())  # type: ignore[arg-type]


def answered(of: Turn, name: str = "1", **call: Any) -> Answer:
    return answer_of(of, name, ModelCall("solver", (), of.tools, **call))


def test_an_answer_without_tools_is_its_text() -> None:
    answer = answered(turn(CALL), "1")
    assert (answer.content, answer.calls, answer.finish) == (CALL, (), "stop")
    assert answered(turn("so", finish="length"), "1").finish == "length"


def test_an_answer_has_its_calls() -> None:
    answer = answered(turn(CALL, tools=True), "7")
    assert answer.content == "I add."
    assert answer.finish == "tool_calls"
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("add", {"a": 1})]
    assert answer.calls[0].id and answer.calls[0].id != answered(turn(CALL, tools=True), "8").calls[0].id
    assert answer.message()["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_a_call_that_cannot_be_read_stays_content() -> None:
    text = '<tool_call>{"name": "add", </tool_call>'
    assert answered(turn(text, tools=True), "1").content == text


@pytest.mark.parametrize("text", ["<think>\nhm\n</think>\n\n3", "hm</think>3"])
def test_reasoning_is_apart_from_the_content(text: str) -> None:
    answer = answered(turn(text), "1")
    assert (answer.reasoning, answer.content) == ("hm", "3")


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool", "_call>", " ", "\n", "<", "a", CALL]), max_size=8
)


@given(pieces.map("".join), st.booleans())
def test_text_that_was_shown_stays(text: str, tools: bool) -> None:
    """A text that begins with reasoning, or has none: its parts only grow, up to the answer's."""
    if text.count("think>") > 2 or ("think>" in text and not text.lstrip().startswith("<think>")):
        return  # text that was shown turns into reasoning later
    answer = answered(turn(text, tools=tools), "1")
    before = "", ""
    for length in range(1, len(text) + 1):
        shown = shown_so_far(text[:length], [TOOL] if tools else [])
        assert shown[0].startswith(before[0])
        assert shown[1].startswith(before[1])
        before = shown
    assert answer.content.startswith(before[1])
    assert answer.reasoning.startswith(before[0])


def test_a_stop_string_ends_what_is_shown() -> None:
    answer = answered(turn("12 Observation: 3"), options={"stop": ["Observation:", "Final"]})
    assert (answer.content, answer.stop) == ("12", "Observation:")
    assert shown_so_far("12 Obs", (), ["Observation:"]) == ("", "12")
    assert shown_so_far("12 Observation: 3", (), ["Observation:"]) == ("", "12")


def test_the_answer_to_a_text_is_its_text() -> None:
    text = " <think>hm</think>" + CALL
    assert answered(turn(text), text="go").content == text


def test_reasoning_that_was_shown_as_content_stays_content() -> None:
    """The template has begun it in the prompt: nothing shows it before its end."""
    sent = SentText(ModelCall("solver", ()))
    assert sent.take_unsent("hm") == ("", "hm")
    answer = sent.agreed(answered(turn("hm</think>3")))
    assert (answer.reasoning, answer.content) == ("", "hm</think>3")
    assert sent.rest(answer) == ("", "</think>3")


def test_a_turn_that_began_again_with_another_text_is_refused() -> None:
    sent = SentText(ModelCall("solver", ()))
    sent.take_unsent("three")
    assert sent.take_unsent("fo") == ("", "")
    with pytest.raises(ApiError, match="began again"):
        sent.agreed(answered(turn("four")))
