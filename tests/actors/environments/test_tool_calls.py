"""Tools: schemas of plain functions, and the calls that an answer contains."""

import gc
import json
import weakref
from collections.abc import Awaitable, Callable

import pytest

from flexmarl.actors.environments.tool_calls import ToolCall, declaration_of, tool_schema
from flexmarl.actors.workflow import Turn


async def add(a: int, b: int = 1, *, scale: float = 1.0) -> float:
    """The sum of two numbers.

    Times a scale."""
    return (a + b) * scale


def test_the_schema_is_that_of_the_signature() -> None:
    schema = tool_schema(add)
    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("add", "The sum of two numbers.\n\nTimes a scale.")
    parameters = function["parameters"]
    assert {name: part["type"] for name, part in parameters["properties"].items()} == {
        "a": "integer",
        "b": "integer",
        "scale": "number",
    }
    assert parameters["required"] == ["a"]
    json.dumps(schema)


LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}


def test_a_schema_is_a_tool_too() -> None:
    schema = tool_schema(LOOK_UP)
    assert schema["function"] == {"description": "", **LOOK_UP["function"]}  # type: ignore[dict-item]
    assert schema == tool_schema(schema) and schema is not LOOK_UP
    bare = tool_schema({"type": "function", "function": {"name": "now"}})
    assert bare["function"]["parameters"] == {"type": "object", "properties": {}}
    text = '<tool_call>{"name": "look_up", "arguments": {"item": "tea"}}</tool_call>'
    turn = Turn("solver", text, (1,), (2,), tools=(tool_schema(add), schema))
    assert turn.tool_calls == (ToolCall("look_up", {"item": "tea"}),)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({}, "is not a schema: needs {'type': 'function', 'function': {'name'"),
        ({"name": "look_up", "parameters": {}}, "is not a schema"),
        ({"type": "function", "function": {"name": ""}}, "is not a schema"),
        (
            {"type": "function", "function": {"name": "f", "parameters": []}},
            "the parameters of the tool f are",
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
            "of the tool f are",
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"x": {1}}}},
            "schema of the tool f is not JSON",
        ),
    ],
)
def test_a_schema_of_another_form_is_refused(schema: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match="the .*tool") as refused:
        tool_schema(schema)
    assert problem in str(refused.value)


def test_a_schema_has_no_function_to_call() -> None:
    with pytest.raises(ValueError, match="the tool look_up is a schema, and has no function to call"):
        declaration_of(LOOK_UP)  # type: ignore[arg-type]


def test_tools_that_have_no_schema_are_refused_by_name() -> None:
    def plain(a: int) -> int:
        return a

    async def strange(a: pytest.Item) -> None: ...

    with pytest.raises(ValueError, match="the tool plain is not an async function"):
        tool_schema(plain)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the tool strange has a parameter without a JSON schema"):
        tool_schema(strange)


def test_arguments_become_what_the_annotations_say() -> None:
    assert declaration_of(add).check({"a": "3", "scale": 2}) == {"a": 3, "b": 1, "scale": 2.0}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "a: Missing required argument"),
        ({"a": "x"}, "a: Input should be a valid integer"),
        ({"a": 1, "c": 2}, "c: Unexpected keyword argument"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        declaration_of(add).check(arguments)


class Board:
    async def move(self, where: str) -> str:
        """Moves."""
        return where


def test_a_method_is_a_tool_without_its_self() -> None:
    schema = tool_schema(Board().move)
    assert list(schema["function"]["parameters"]["properties"]) == ["where"]
    assert tool_schema(Board().move) is schema, "one for all boards"


def test_the_functions_of_a_trajectory_end_with_it() -> None:
    def made(board: Board) -> Callable[[int], Awaitable[Board]]:
        async def look(row: int) -> Board:
            return board

        return look

    boards = [Board() for _ in range(3)]
    for board in boards:
        tool = made(board)
        assert tool_schema(tool)["function"]["name"] == "look" and declaration_of(tool).check({"row": 1})
    kept = [weakref.ref(board) for board in boards]
    del board, boards, tool
    gc.collect()
    assert [board() for board in kept] == [None, None, None]
