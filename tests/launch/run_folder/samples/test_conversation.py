"""The text of a trajectory that a program has played: turns by number, tools, branches, the service's metadata."""

import io
from typing import Any

from rich.console import Console

from flexmarl.actors.messages import Query
from flexmarl.actors.names import AgentName, Step, Version
from flexmarl.actors.recorded_trajectory import PromptPart, RecordedTrajectory, RecordedTurn
from flexmarl.launch.run_folder.samples.conversation import show


def turn(number: int, text: str, *prompt: PromptPart) -> RecordedTurn:
    tokens = tuple(range(len(text)))
    rest: tuple[Any, ...] = (5, tokens, (), Version(3), "stop", 1.0, None, 1.0, (), {})
    return RecordedTurn(number, AgentName("solver"), prompt, text, *rest)


def test_a_program_is_shown_with_its_tools_and_branches() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = (
        turn(0, "first", {"role": "user", "content": "1+1?"}),
        turn(1, "second", 0, {"role": "tool", "tool_call_id": "c1", "content": "2"}),
        turn(2, "third", 0, {"role": "user", "content": "again"}),
        turn(3, "fourth", {"role": "assistant", "content": "", "tool_calls": [call]})._replace(left_out=True),
    )
    query = Query("live-1", "")
    trajectory = RecordedTrajectory(
        Step(2), False, query, 0, {"solver": 1.0}, {}, "", turns, (), {"user": 17, "tags": ["a"]}
    )
    output = io.StringIO()
    show(Console(file=output, width=200), trajectory)
    lines = output.getvalue().splitlines()
    assert lines[1:3] == ["tags: ['a']", "user: 17"]
    said = [line for line in lines if line.startswith("solver")]
    assert [line.split(" · ")[0] for line in said] == [f"solver  turn {number}" for number in range(4)]
    assert [number for number, line in enumerate(said) if "not trained" in line] == [3]
    arrows = [line for line in lines if "↑" in line]
    assert arrows == ["  ↑ the conversation of turn 0", "  ↑ the conversation of turn 0, once more: a branch"]
    assert '  calls add({"a": 1})' in lines and "  tool: 2" in lines
