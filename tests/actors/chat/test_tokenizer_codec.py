"""Text and tokens of a Hugging Face tokenizer."""

from typing import Any

import pytest

from flexmarl.actors.chat.answer import parse_answer
from flexmarl.actors.chat.tokenizer_codec import TokenizerCodec
from flexmarl.actors.environments.tool_calls import ToolCall
from flexmarl.actors.inference.incremental_text import IncrementalText

from .chat_tokenizer import CHATML, END, chat_tokenizer

CALL = 'I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
MARKS = ("<tool_call>", "</tool_call>")


def tokenizer_with(marks: tuple[str, ...]) -> Any:
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *marks]})
    return tokenizer


@pytest.mark.parametrize("marks", [(), MARKS, MARKS[:1]], ids=str)
def test_a_call_stays_in_the_text_also_if_its_marks_are_special_tokens(marks: tuple[str, ...]) -> None:
    codec = TokenizerCodec(tokenizer_with(marks))
    tokens = (*codec.encode(CALL, False), END)
    assert len(tokens) == len(CALL) + 1 - sum(len(mark) - 1 for mark in marks), "a mark is one token"
    assert codec.decode(tokens) == CALL, "without the end"
    assert parse_answer(codec.decode(tokens)).tool_calls(["add"]) == (ToolCall("add", {"a": 1}),)
    arriving = IncrementalText(codec.decode)
    assert "".join(arriving.take((token,)).complete for token in tokens) == CALL


def test_other_special_tokens_are_left_out_beside_marks() -> None:
    codec = TokenizerCodec(tokenizer_with(MARKS))
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert codec.decode(codec.encode(text, False)) == "user\nhello\n"
