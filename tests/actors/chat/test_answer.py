"""Answers as text: the calls that one contains."""

import pytest

from flexmarl.actors.chat.answer import foreign_form, parse_tool_calls
from flexmarl.actors.environments.tool_calls import ToolCall, tool_schema
from flexmarl.actors.workflow import Turn

from .chat_tokenizer import chat_tokenizer


async def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


def test_half_of_a_character_in_a_call_is_an_error_for_the_agent_to_read() -> None:
    text = r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>'
    (call,) = parse_tool_calls(text, ["add"])
    assert call.arguments == {} and r"arguments.a is '\ud83d': half of a surrogate pair" in call.error
    whole = r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d\ude00"}}</tool_call>'
    assert parse_tool_calls(whole, ["add"]) == (ToolCall("add", {"a": "\U0001f600"}),)


def test_calls_are_parsed_in_order() -> None:
    text = (
        'I add.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and '
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    )
    assert parse_tool_calls(text, ["add"]) == (
        ToolCall("add", {"a": 1}),
        ToolCall("add", {"a": 2, "b": 3}),
    )
    assert parse_tool_calls("nothing", ["add"]) == ()


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
    (call,) = parse_tool_calls(f"<tool_call>{written}", ["add"])
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
    assert parse_tool_calls(text.format(call=call), ["add"]) == ()
    assert parse_tool_calls(text.format(call="") + call, ["add"])[-1:] == (
        () if text.endswith("{call}") else (ToolCall("add", {"a": 1}),)
    )


def test_a_call_before_further_reasoning_is_one() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><think>and now?</think>'
    assert parse_tool_calls(text, ["add"]) == (ToolCall("add", {"a": 1}),)


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
