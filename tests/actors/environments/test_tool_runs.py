"""Runs of a turn's tool calls: results and errors are messages for the agent."""

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from flexmarl.actors.chat.answer import Answer, WrittenCall
from flexmarl.actors.environments.tool_runs import run_tools
from flexmarl.actors.errors import LimitReached
from flexmarl.actors.workflow import Turn


async def add(a: int, b: int = 1) -> int:
    return a + b


async def fails(kind: str) -> None:
    if kind == "exit":
        sys.exit(1)
    if kind == "cancel":
        raise asyncio.CancelledError
    raise KeyError(kind)


def turn(*calls: tuple[str, dict[str, Any]]) -> Turn:
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return Turn("solver", "".join(f"<tool_call>{text}</tool_call>" for text in texts), (1,), (2,))


async def contents(asked: Turn, *tools: Any, **limits: Any) -> list[str]:
    return [message["content"] for message in await run_tools(asked, tools, **limits)]


async def test_all_calls_of_a_turn_are_made() -> None:
    assert await run_tools(turn(("add", {"a": "1"}), ("add", {"a": 2, "b": 3})), [add]) == [
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "tool", "name": "add", "content": "5"},
    ]
    assert await run_tools(turn(), [add]) == []


async def test_a_result_names_its_call() -> None:
    answer = Answer("", calls=(WrittenCall("add", '{"a": 1}', id="123456789"), WrittenCall("", error="torn")))
    assert await run_tools(replace(turn(), answer=answer), [add]) == [
        {"role": "tool", "tool_call_id": "123456789", "name": "add", "content": "2"},
        {"role": "tool", "name": "", "content": "error: torn"},
    ]


async def test_calls_of_a_turn_run_at_once() -> None:
    meeting = asyncio.Barrier(2)

    async def meet() -> dict[str, bool]:
        await meeting.wait()
        return {"met": True}

    assert await contents(turn(("meet", {}), ("meet", {})), meet) == ['{"met": true}'] * 2


async def test_errors_are_given_to_the_agent() -> None:
    asked = turn(
        ("fails", {"kind": "x"}),
        ("fails", {"kind": "exit"}),
        ("fails", {"kind": "cancel"}),
        ("add", {"a": "x"}),
        ("sub", {}),
        ("add", {"a": 1}),
    )
    found = await contents(asked, add, fails)
    assert found[:3] == [
        "error: KeyError: 'x'",
        "error: SystemExit: 1",
        "error: the tool was cancelled",
    ]
    assert found[3].startswith("error: ValueError: a: Input should be a valid integer")
    assert found[4:] == ["error: there is no tool sub; there is: add, fails", "2"]


async def test_a_tool_that_hangs_is_left_behind() -> None:
    stopped = asyncio.Event()

    async def hangs() -> None:
        while not stopped.is_set():
            try:
                await stopped.wait()
            except asyncio.CancelledError:
                continue

    asked = turn(("hangs", {}), ("add", {"a": 1}))
    assert await contents(asked, hangs, add, timeout_s=0.01) == ["error: no result within 0.01 s", "2"]
    stopped.set()
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)


async def test_results_and_calls_have_limits() -> None:
    async def long() -> str:
        return "x" * 50

    asked = turn(*[("long", {})] * 3)
    assert await contents(asked, long, max_chars=4, max_calls=2) == [
        "xxxx... (cut: 50 characters)",
        "xxxx... (cut: 50 characters)",
        "erro... (cut: 40 characters)",
    ]


async def test_the_end_of_a_trajectory_is_not_the_tools() -> None:
    async def asks() -> None:
        raise LimitReached("helper", "rollout.trajectory_turns", 3)

    with pytest.raises(LimitReached, match="agent helper"):
        await contents(turn(("asks", {})), asks)


async def test_mistakes_of_the_workflow_are_named() -> None:
    with pytest.raises(ValueError, match="two tools have the name add"):
        await run_tools(turn(), [add, add])
    with pytest.raises(ValueError, match="timeout_s=0"):
        await run_tools(turn(), [add], timeout_s=0)
