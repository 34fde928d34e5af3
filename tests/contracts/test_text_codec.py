"""Promises of every text codec about conversations: the tokens of a turn begin the prompt of the next one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.chat.byte_codec import END_OF_SEQUENCE, ByteCodec
from flexmarl.actors.chat.chat_prompt import chat_prompt
from flexmarl.actors.chat.conversation import Conversation, conversation_rows
from flexmarl.actors.chat.renderer_codec import RendererCodec
from flexmarl.actors.chat.text_codec import TextCodec
from flexmarl.actors.chat.tokenizer_codec import TokenizerCodec
from flexmarl.actors.environments.tool_calls import ToolCall, tool_schema
from flexmarl.actors.messages import Chat

from ..actors.chat.qwen3_tokenizer import qwen3_tokenizer

QWEN3 = qwen3_tokenizer()
CODECS: dict[str, tuple[TextCodec, int]] = {
    "bytes": (ByteCodec("bytes"), END_OF_SEQUENCE),
    "template": (TokenizerCodec(QWEN3), QWEN3.eos_token_id),
    "auto": (RendererCodec(QWEN3, "auto"), QWEN3.eos_token_id),
    "family": (RendererCodec(qwen3_tokenizer("a folder"), "qwen3"), QWEN3.eos_token_id),
    "unknown": (RendererCodec(qwen3_tokenizer("a folder"), "auto"), QWEN3.eos_token_id),
}
RENDERED = ("auto", "family")
SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "1 + 1?"}


async def add(a: int, b: str = "") -> int:
    """The sum."""
    return a


TOOLS = (tool_schema(add),)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é\\"x"}}\n</tool_call>'
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=12).map(str.strip)
MESSAGES = st.tuples(st.sampled_from(["user", "tool", "system"]), TEXTS.filter(bool))
TURNS = st.lists(
    st.tuples(st.lists(MESSAGES, min_size=1, max_size=3), TEXTS, st.integers(0, 2), st.booleans()), max_size=4
)


@pytest.mark.parametrize("name", CODECS)
@given(turns=TURNS)
def test_the_tokens_of_a_turn_begin_the_next_prompt(name: str, turns: list[Any]) -> None:
    """Answers with calls, without reasoning, that end by their token or are cut off."""
    codec, end = CODECS[name]
    messages: list[dict[str, Any]] = [SYSTEM, USER]
    answered = 0
    before: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    for new, text, calls, is_whole in [([], "", 0, True), *turns]:
        messages += [{"role": role, "content": content} for role, content in new]
        prompt = chat_prompt("q", Chat(tuple(messages), TOOLS, answered), before, answer, codec)
        assert prompt[: len(before + answer)] == before + answer
        assert len(prompt) > len(before + answer)
        before, answer = prompt, (*codec.encode(text + CALL * calls, False), *((end,) if is_whole else ()))
        answer = answer or codec.encode("x", False)
        parts = codec.parse(before, answer, codec.decode(answer), TOOLS).with_ids(f"turn {len(messages)}")
        assert parts.tool_calls(["add"]) == (ToolCall("add", {"a": 1, "b": 'é"x'}),) * calls
        messages.append(parts.message)
        answered = len(messages)


@pytest.mark.parametrize("name", CODECS)
def test_an_answer_has_content_reasoning_and_calls(name: str) -> None:
    codec, end = CODECS[name]
    prompt = chat_prompt("q", Chat((USER,), TOOLS), (), (), codec)
    answer = (*codec.encode(f"<think>\nadd\n</think>\n\nSo.\n{CALL}", False), end)
    parts = codec.parse(prompt, answer, codec.decode(answer), TOOLS)
    assert (parts.content, parts.reasoning) == ("So.", "add")
    assert parts.tool_calls(["add"]) == (ToolCall("add", {"a": 1, "b": 'é"x'}),)
    (unknown,) = parts.tool_calls([])
    assert unknown.error == "there is no tool add; there is: none"
    result = {"role": "tool", "name": "add", "content": "3"}
    (call,) = parts.with_ids("q").message["tool_calls"]
    chat = Chat((USER, parts.with_ids("q").message, {**result, "tool_call_id": call["id"]}), TOOLS, 2)
    after = chat_prompt("q", chat, prompt, answer, codec)
    assert after[: len(prompt + answer)] == prompt + answer
    assert "3" in codec.decode(after[len(prompt + answer) :])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    "written", ["{", "[1]", '{"arguments": {}}', '{"name": "add", "arguments": [1]}', "[" * 50_000]
)
def test_a_call_that_can_not_be_read_has_an_error_and_stays_in_the_content(name: str, written: str) -> None:
    codec, end = CODECS[name]
    prompt = chat_prompt("q", Chat((USER,), TOOLS), (), (), codec)
    answer = (*codec.encode(f"So.<tool_call>\n{written}\n</tool_call>", False), end)
    parts = codec.parse(prompt, answer, codec.decode(answer), TOOLS).with_ids("q")
    (call,) = parts.tool_calls(["add"])
    assert call.error and not call.id
    assert written in parts.content and parts.content.startswith("So.") and "tool_calls" not in parts.message


HISTORY = (
    SYSTEM,
    USER,
    {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "add them",
        "tool_calls": [
            {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "a2", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a1", "content": "1"},
    {"role": "tool", "tool_call_id": "a2", "name": "add", "content": "2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "Sure?"},
)


@pytest.mark.parametrize("count", range(2, len(HISTORY) + 1))
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_a_family_s_prompt_is_that_of_its_template(count: int, tools: Any, options: dict[str, bool]) -> None:
    family, template = RendererCodec(QWEN3, "qwen3", options), TokenizerCodec(QWEN3, options)
    chat = Chat(HISTORY[:count], tools)
    if options and count > 5:
        pytest.skip("the library keeps the empty reasoning of an answer that was generated without any")
    assert chat_prompt("q", chat, (), (), family) == chat_prompt("q", chat, (), (), template)


@pytest.mark.parametrize("name", RENDERED)
def test_reasoning_stays_where_a_family_s_template_would_leave_it_out(name: str) -> None:
    codec, end = CODECS[name]
    prompt = chat_prompt("q", Chat((USER,)), (), (), codec)
    answer = (*codec.encode("<think>\nadd\n</think>\n\n2", False), end)
    message = codec.parse(prompt, answer, codec.decode(answer), ()).message
    chat = Chat((USER, message, {"role": "user", "content": "Sure?"}), answered=2)
    after = chat_prompt("q", chat, prompt, answer, codec)
    assert after[: len(prompt + answer)] == prompt + answer
    rest = QWEN3.decode(after[len(prompt + answer) :])
    assert rest == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", RENDERED)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_supervised_rows_are_what_a_turn_would_be(name: str, options: dict[str, bool]) -> None:
    _, end = CODECS[name]
    codec = RendererCodec(QWEN3, "qwen3", options)
    call, second = conversation_rows(Conversation(HISTORY[:6], TOOLS), codec, end)
    prompt = chat_prompt("q", Chat(HISTORY[:2], TOOLS), (), (), codec)
    assert call[0] == prompt and call[1][-1] == end
    parts = codec.parse(prompt, call[1], codec.decode(call[1]), TOOLS)
    assert [json.loads(one.arguments) for one in parts.calls] == [{"a": 1}, {"a": 2}]
    assert parts.content == "Let me see."
    turn = {**parts.with_ids("q").message}
    chat = Chat((*HISTORY[:2], turn, *HISTORY[3:5]), TOOLS, 3)
    assert second[0] == chat_prompt("q", chat, *call, codec)
    assert codec.parse(second[0], second[1], codec.decode(second[1]), TOOLS).content == "3"


@pytest.mark.parametrize("name", RENDERED)
def test_a_role_that_the_library_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(Exception, match=r"leaves out messages\[1\], of the role 'critic'"):
        chat_prompt("q", Chat((USER, {"role": "critic", "content": "no"})), (), (), CODECS[name][0])


def test_a_tokenizer_without_the_family_s_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"renderers can't use the tokenizer Qwen/Qwen3-0.6B as 'glm-4.5'"):
        RendererCodec(QWEN3, "glm-4.5").prepare()
    with pytest.raises(ValueError, match="as 'qwen9'"):
        RendererCodec(QWEN3, "qwen9").prepare()
    with pytest.raises(ValueError, match="as 'qwen3'.*enable_thought"):
        RendererCodec(QWEN3, "qwen3", {"enable_thought": True}).prepare()


def test_nothing_is_imported_before_a_conversation() -> None:
    codec = RendererCodec(QWEN3, "auto")
    assert not codec.is_ready and codec.decode(codec.encode("plain", True)) == "plain"
    assert not codec.is_ready
    codec.prepare()
    assert getattr(codec, "is_ready")  # noqa: B009  # mypy takes the first answer for the only one
    assert codec.family == "qwen3"
