"""Supervised examples of messages are the rows that reinforcement learning would have, answer by answer."""

from typing import Any

import pytest

from flexmarl.actors.chat.byte_codec import ByteCodec
from flexmarl.actors.chat.chat_prompt import chat_prompt
from flexmarl.actors.chat.conversation import Conversation, conversation_of, conversation_rows
from flexmarl.actors.chat.tokenizer_codec import TokenizerCodec
from flexmarl.actors.messages import Chat

from .chat_tokenizer import CALLS, CHATML, END, FORGETTING, TRIMMING, WITHOUT_TOOL_RESULTS, chat_tokenizer

ENDLESS = CHATML.replace("<|im_end|>", "")
SYSTEM = {"role": "system", "content": "Be short."}
FIRST = {"role": "user", "content": "1+1?"}
SECOND = {"role": "user", "content": "Sure?"}
RESULT = {"role": "tool", "content": "2"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}


async def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


def codec(template: str | None = CHATML) -> TokenizerCodec:
    return TokenizerCodec(chat_tokenizer(template))


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def shown(tokens: tuple[int, ...]) -> str:
    """With special tokens."""
    text: str = chat_tokenizer().decode(tokens, skip_special_tokens=False)
    return text


def test_each_answer_is_a_row_behind_the_prompt_that_generate_makes() -> None:
    one = codec()
    rows = conversation_rows(
        conversation_of([SYSTEM, FIRST, answer("2"), SECOND, answer(" Yes. ")]), one, END
    )
    first = chat_prompt("q", Chat((SYSTEM, FIRST)), (), (), one)
    generated = (*one.encode("2", False), END)
    second = chat_prompt("q", Chat((SYSTEM, FIRST, answer("2"), SECOND), answered=3), first, generated, one)
    assert rows == [(first, generated), (second, (*one.encode(" Yes. ", False), END))]


def test_calls_of_tools_are_written_as_the_template_writes_them() -> None:
    one = codec(CALLS)
    example = {
        "messages": [
            FIRST,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            RESULT,
            answer("2"),
        ],
        "tools": [add],
    }
    conversation = conversation_of(example)
    call, last = conversation_rows(conversation, one, END)
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    assert shown(call[1]) == f"{text}<|im_end|>"
    assert shown(call[0]).startswith('<|im_start|>system\n[{"type": "function"')
    generated = Chat((FIRST, answer(text), RESULT), conversation.tools, 2)
    assert last == (chat_prompt("q", generated, *call, one), (*one.encode("2", False), END))


def test_white_space_is_the_template_s() -> None:
    one = codec(TRIMMING)
    first, second = conversation_rows(Conversation((FIRST, answer(" 2 "), SECOND, answer("Yes"))), one, END)
    assert shown(first[1]) == "2<|im_end|>" and second[0][: len(first[0]) + 2] == first[0] + first[1]


@pytest.mark.parametrize("one", [codec(ENDLESS), ByteCodec("bytes")])
def test_a_template_that_ends_no_answer_has_the_end_token_all_the_same(one: Any) -> None:
    (row,) = conversation_rows(Conversation((FIRST, answer("2"))), one, END)
    assert row == (chat_prompt("q", Chat((FIRST,)), (), (), one), (*one.encode("2", False), END))


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (None, (FIRST, answer("2")), "has no chat template"),
        (WITHOUT_TOOL_RESULTS, (FIRST, RESULT, answer("2")), "leaves out or rewrites"),
        (FORGETTING, (FIRST, answer("<think>so</think>2"), SECOND, answer("Yes")), None),
    ],
)
def test_templates_that_change_messages(
    template: str | None, messages: tuple[dict[str, Any], ...], problem: str | None
) -> None:
    if problem is None:  # the reasoning is left out of the example itself
        first, _ = conversation_rows(Conversation(messages), codec(template), END)
        assert shown(first[1]) == "2<|im_end|>"
        return
    with pytest.raises(ValueError, match=problem):
        conversation_rows(Conversation(messages), codec(template), END)


def test_an_answer_without_an_end_can_t_have_calls() -> None:
    messages = (FIRST, {"role": "assistant", "content": None, "tool_calls": [CALL]})
    template = CALLS.replace("<|im_end|>", "")
    with pytest.raises(ValueError, match=r"ends messages\[1\] without the tokenizer's end token"):
        conversation_rows(Conversation(messages), codec(template), END)


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        ([], "no message of the role 'assistant'"),
        ([FIRST], "no message of the role 'assistant'"),
        ([answer("2"), FIRST], "an answer as the first message"),
        ([FIRST, {"content": "2"}], r"messages\[1\] has no role"),
        ([FIRST, "2"], "something else than a list of messages"),
        ({"messages": "2"}, "something else than a list of messages"),
        ({"messages": [FIRST, answer("2")], "tool": []}, "the unknown key 'tool'"),
        ({"messages": [FIRST, answer("2")], "tools": [len]}, "the tool len is not an async function"),
        ({"messages": [FIRST, answer("2")], "tools": "add"}, "tools of another kind than a list"),
        (3, "something else than a list of messages"),
        ([FIRST, answer("\ud83d")], "half"),
    ],
)
def test_an_invalid_example_is_named(example: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        conversation_of(example)
