"""The turn that a request continues."""

from typing import Any

from flexmarl.actors.gateway.conversations import Conversations
from flexmarl.actors.workflow import Turn

USER = {"role": "user", "content": "1 + 2?"}
ANSWER = {"role": "assistant", "content": "3"}
MORE = {"role": "user", "content": "and 4?"}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}


def turn(name: str) -> Turn:
    return Turn("solver", "3", (1,), (2,), name)


def conversations(*added: tuple[list[dict[str, Any]], dict[str, Any]], tools: Any = ()) -> Conversations:
    """Each of the conversations and its answer; the turns are named by their numbers."""
    known = Conversations()
    for number, (messages, answer) in enumerate(added):
        known.add("solver", messages, tools, answer, turn(f"{number}"))
    return known


def test_a_conversation_without_answers_begins() -> None:
    place = Conversations().place("solver", [USER], ())
    assert place.turn is None
    assert place.messages == (USER,)
    assert not place.difference


def test_a_conversation_continues_the_longest_known_one() -> None:
    answer = {"role": "assistant", "content": "7"}
    known = conversations(([USER], ANSWER), ([USER, ANSWER, MORE], answer))
    place = known.place("solver", [USER, ANSWER, MORE, answer, MORE, MORE], ())
    assert place.turn == turn("1")
    assert place.messages == (MORE, MORE)


def test_keys_that_programs_leave_out_do_not_count() -> None:
    known = conversations(([USER], {**ANSWER, "reasoning_content": "1 + 2 is 3"}))
    assert known.place("solver", [{**USER, "name": "me"}, ANSWER, MORE], ()).turn == turn("0")


def test_the_arguments_of_calls_are_compared_as_data() -> None:
    def calling(arguments: str) -> dict[str, Any]:
        function = {"name": "add", "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}

    known = conversations(([USER], calling('{"a": 1, "b": 2}')))
    reply = {"role": "tool", "tool_call_id": "c", "content": "3"}
    assert known.place("solver", [USER, calling('{"b":2,"a":1}'), reply], ()).turn == turn("0")
    assert known.place("solver", [USER, calling('{"b":3,"a":1}'), reply], ()).turn is None


def test_another_agent_and_other_tools_continue_nothing() -> None:
    known = conversations(([USER], ANSWER))
    assert known.place("critic", [USER, ANSWER, MORE], ()).turn is None
    place = known.place("solver", [USER, ANSWER, MORE], [TOOL])
    assert place.turn is None
    assert place.difference == "its tools are others"


def test_a_rewritten_conversation_names_its_first_difference() -> None:
    known = conversations(([USER], ANSWER))
    other = {"role": "assistant", "content": "three"}
    place = known.place("solver", [USER, other, MORE], ())
    assert place.turn is None
    assert place.messages == (USER, other, MORE)
    assert place.difference == "message 1 was 'assistant: 3', is 'assistant: three'"


def test_the_kind_of_a_turn_is_its_relation_to_those_before_it() -> None:
    known = Conversations()
    other = {"role": "assistant", "content": "three"}
    assert known.add("solver", [USER], (), ANSWER, turn("0")) == "begun"
    assert known.add("solver", [USER, ANSWER, MORE], (), ANSWER, turn("1")) == "merged"
    assert known.add("solver", [USER, ANSWER, USER], (), ANSWER, turn("2")) == "branched"
    assert known.add("solver", [USER, other, MORE], (), ANSWER, turn("3")) == "branched"
    assert known.add("solver", [MORE], (), ANSWER, turn("4")) == "begun"
