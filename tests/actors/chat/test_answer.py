"""Answers as text: the calls that one contains."""

import pytest

from flexmarl.actors.chat.answer import foreign_form, parse_answer
from flexmarl.actors.environments.tool_calls import ToolCall, tool_schema
from flexmarl.actors.workflow import Turn

from .chat_tokenizer import chat_tokenizer


async def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


def test_half_of_a_character_in_a_call_is_an_error_for_the_agent_to_read() -> None:
    text = r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>'
    (call,) = parse_answer(text).tool_calls(["add"])
    assert call.arguments == {} and r"arguments.a is '\ud83d': half of a surrogate pair" in call.error
    whole = r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d\ude00"}}</tool_call>'
    assert parse_answer(whole).tool_calls(["add"]) == (ToolCall("add", {"a": "\U0001f600"}),)


def test_calls_are_parsed_in_order() -> None:
    text = (
        'I add.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and '
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    )
    assert parse_answer(text).tool_calls(["add"]) == (
        ToolCall("add", {"a": 1}),
        ToolCall("add", {"a": 2, "b": 3}),
    )
    assert parse_answer("nothing").tool_calls(["add"]) == ()


@pytest.mark.parametrize(
    ("written", "name", "error"),
    [
        ('{"name": "add", "arguments": {}', "", "the call has no </tool_call>"),
        ("{name: add}</tool_call>", "", "the call is not valid JSON"),
        ("[1]</tool_call>", "", "the call is not {"),
        ('{"arguments": {}}</tool_call>', "", "the call is not {"),
        ('{"name": "add", "arguments": [1]}</tool_call>', "add", "the arguments are not a JSON object"),
        ('{"name": "sub", "arguments": {}}</tool_call>', "sub", "there is no tool sub; there is: add"),
        ('{"name": "add", "parameters": {"a": 1}}</tool_call>', "add", 'write "arguments"'),
    ],
)
def test_a_call_that_can_not_be_made_has_an_error_for_the_agent(written: str, name: str, error: str) -> None:
    (call,) = parse_answer(f"<tool_call>{written}").tool_calls(["add"])
    assert call.name == name and error in call.error


@pytest.mark.parametrize(
    "text",
    [
        "<think>perhaps {call}</think> no",
        "{call} perhaps</think> no",  # the template has begun the reasoning, in the prompt
        "<think>perhaps {call}",  # cut off
        "<think>a</think><think>{call}</think>",
    ],
)
def test_a_call_within_the_reasoning_is_none(text: str) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert parse_answer(text.format(call=call)).tool_calls(["add"]) == ()
    assert parse_answer(text.format(call="") + call).tool_calls(["add"])[-1:] == (
        () if text.endswith("{call}") else (ToolCall("add", {"a": 1}),)
    )


def test_a_call_before_further_reasoning_is_one() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><think>and now?</think>'
    assert parse_answer(text).tool_calls(["add"]) == (ToolCall("add", {"a": 1}),)


HERMES = (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, None),
        (HERMES, None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        (HERMES.replace("'arguments'", "'parameters'"), "in another form than <tool_call>"),
        (HERMES.replace("<tool_call>", "[TOOL_CALLS]"), "in another form than <tool_call>"),
        ("{{ raise_exception('no tools here') }}", "takes no calls of tools (TemplateError: no tools here)"),
    ],
)
def test_a_chat_template_that_writes_calls_in_another_form_is_named(
    template: str | None, reason: str | None
) -> None:
    found = foreign_form(chat_tokenizer(template))
    assert found is None if reason is None else found is not None and reason in found


def test_a_turn_knows_the_calls_of_its_tools() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    turn = Turn("solver", text, (1,), (2,), tools=(tool_schema(add),))
    assert turn.tool_calls == (ToolCall("add", {"a": 1}),)
    (call,) = Turn("solver", text, (1,), (2,)).tool_calls
    assert call.error == "there is no tool add; there is: none"


ANSWER = (
    "<think>\nadd them\n</think>\n\nLet me see.\n<tool_call>\n"
    '{"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}\n</tool_call>\n<tool_call>\n{"name": }\n</tool_call>'
)


def test_an_answer_is_a_message_of_openai_s_form() -> None:
    answer = parse_answer(ANSWER).with_ids("1:q_0_0")
    call, broken = answer.calls
    assert answer.message == {
        "role": "assistant",
        "content": 'Let me see.\n\n<tool_call>\n{"name": }\n</tool_call>',
        "reasoning_content": "add them",
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": "\u00e9"}'},
            }
        ],
    }
    assert broken.error and broken.id == "" and len(call.id) == 9
    assert parse_answer(" 2 ").message == {"role": "assistant", "content": " 2 "}


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        ("a</think>b", "a", "b"),  # the template has begun the reasoning, in the prompt
        ("<think>a", "a", ""),  # cut off
        ("<think>a</think><think>b</think>c", "a\nb", "c"),
        ("b<think>a</think>", "a", "b"),
    ],
)
def test_the_reasoning_is_apart_from_the_content(text: str, reasoning: str, content: str) -> None:
    turn = Turn("solver", text, (1,), (2,))
    assert (turn.reasoning, turn.message["content"]) == (reasoning, content)


@pytest.mark.parametrize("written", ["[" * 100_000, "9" * 10_000, '{"a":' * 100_000])
def test_a_call_that_no_json_reader_takes_is_an_error_for_the_agent(written: str) -> None:
    (call,) = parse_answer(f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>').calls
    assert "not valid JSON" in call.error
