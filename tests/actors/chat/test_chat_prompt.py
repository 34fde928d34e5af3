"""Conversations stay the tokens that were generated, and templates that change them are refused."""

from typing import Any

import pytest

from flexmarl.actors.chat.answer import parse_answer
from flexmarl.actors.chat.byte_codec import ByteCodec
from flexmarl.actors.chat.chat_prompt import chat_prompt
from flexmarl.actors.chat.text_codec import TextCodec
from flexmarl.actors.chat.tokenizer_codec import TokenizerCodec
from flexmarl.actors.errors import InvalidRequest
from flexmarl.actors.messages import Chat

from .chat_tokenizer import (
    CALLS,
    CHATML,
    END,
    FAILING,
    FORGETTING,
    TRIMMING,
    WITHOUT_TOOL_RESULTS,
    chat_tokenizer,
)

SYSTEM = {"role": "system", "content": "Be short."}
FIRST = {"role": "user", "content": "1+1?"}
SECOND = {"role": "user", "content": "Sure?"}


def codec(template: str | None = CHATML) -> TokenizerCodec:
    return TokenizerCodec(chat_tokenizer(template))


def shown(tokens: tuple[int, ...]) -> str:
    """With special tokens."""
    text: str = chat_tokenizer().decode(tokens, skip_special_tokens=False)
    return text


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_the_first_prompt_is_the_template_s_text() -> None:
    prompt = chat_prompt("q", Chat((SYSTEM, FIRST)), (), (), codec())
    assert shown(prompt) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("ended", [True, False])
def test_only_the_template_s_new_text_is_tokenised(ended: bool) -> None:
    one = codec()
    first = chat_prompt("q", Chat((SYSTEM, FIRST)), (), (), one)
    # other tokens than those of the text: as a model may split it in its own way
    generated = (*one.encode("It is ", False), 777, *((END,) if ended else ()))
    chat = Chat((SYSTEM, FIRST, answer("It is 2."), SECOND), answered=3)
    second = chat_prompt("q", chat, first, generated, one)
    assert second[: len(first) + len(generated)] == first + generated
    rest = shown(second[len(first) + len(generated) :])
    end = "" if ended else "<|im_end|>"
    assert rest == f"{end}\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_many_turns_are_one_conversation() -> None:
    one, messages = codec(), [SYSTEM]
    known: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    for turn in range(4):
        messages.append({"role": "user", "content": f"question {turn}"})
        answered = len(messages) - 1 if turn else 0
        before = chat_prompt("q", Chat(tuple(messages), answered=answered), before, generated, one)
        assert before[: len(known)] == known
        text = f" answer {turn}"
        generated = (*one.encode(text, False), END)
        known = before + generated
        messages.append(answer(text))
    whole = one.chat_text(messages, ())
    assert shown(known) + "\n<|im_start|>assistant\n" == whole, (
        "the same as if all of it were tokenised at once"
    )


def test_white_space_that_a_template_strips_stays() -> None:
    one = codec(TRIMMING)
    first = chat_prompt("q", Chat((FIRST,)), (), (), one)
    generated = (*one.encode(" 2 \n", False), END)
    known = first + generated
    second = chat_prompt("q", Chat((FIRST, answer(" 2 \n"), SECOND), answered=2), first, generated, one)
    assert second[: len(known)] == known
    assert shown(second[len(known) :]) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_rewrites_an_answer_is_refused_with_the_difference() -> None:
    one = codec(FORGETTING)
    chat = Chat((FIRST, answer("<think>one more</think>2"), SECOND), answered=2)
    with pytest.raises(InvalidRequest) as caught:
        chat_prompt("1:q_1_0", chat, (1, 2, 3), one.encode("<think>one more</think>2", False), one)
    text = str(caught.value)
    assert "request 1:q_1_0: the chat template of small-chat rewrites earlier turns" in text
    assert "<think>one more" in text and "becomes" in text and "retokenize=True" in text
    again = chat_prompt("1:q_1_0", Chat(chat.messages), (), (), one)
    assert "assistant\n2<|im_end|>" in shown(again) and "think" not in shown(again)


def test_a_template_that_leaves_a_message_out_is_refused() -> None:
    one = codec(WITHOUT_TOOL_RESULTS)
    result = {"role": "tool", "content": "4 apples"}
    for chat in (Chat((FIRST, result)), Chat((FIRST, answer("?"), result), answered=2)):
        with pytest.raises(
            InvalidRequest, match=r"leaves out or rewrites messages\[\d\], of the role 'tool': '4 app"
        ):
            chat_prompt("q", chat, (1, 2), one.encode("?", False), one)


def test_a_content_that_a_template_writes_as_json_is_not_left_out() -> None:
    template = CHATML.replace("{{ message.content }}", "{{ message.content | tojson }}")
    quoted = {"role": "tool", "content": 'a "b"\nc'}
    prompt = chat_prompt("q", Chat((FIRST, quoted)), (), (), codec(template))
    assert "b" in shown(prompt)


def test_a_tokenizer_without_a_template_and_a_template_that_fails_are_named() -> None:
    with pytest.raises(InvalidRequest, match="small-chat has no chat template"):
        chat_prompt("q", Chat((FIRST,)), (), (), codec(None))
    with pytest.raises(InvalidRequest, match=r"chat template of small-chat failed: .*no system role"):
        chat_prompt("q", Chat((SYSTEM, FIRST)), (), (), codec(FAILING))


def test_tools_are_given_to_the_template() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    assert '"name": "add"' in shown(chat_prompt("q", Chat((FIRST,), (tool,)), (), (), codec()))


def test_an_answer_continues_by_its_text_where_its_message_has_fields() -> None:
    one = codec()
    first = chat_prompt("q", Chat((FIRST,)), (), (), one)
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    generated = (*one.encode(text, False), END)
    message = parse_answer(text).with_ids("1:q_0_0").message
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "name": "add", "content": "2"}
    second = chat_prompt("q", Chat((FIRST, message, result), answered=2), first, generated, one)
    assert second[: len(first) + len(generated)] == first + generated
    rest = shown(second[len(first) + len(generated) :])
    assert rest == "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize("one", [codec(), codec(CALLS), ByteCodec("bytes")])
def test_a_prompt_of_messages_has_their_calls_also_without_a_field_in_the_template(
    one: TextCodec, arguments: object
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    message = {"role": "assistant", "content": "So.", "tool_calls": [call]}
    text = one.chat_text((FIRST, message, SECOND), ())
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text and "So." in text
