"""Requests to sessions that come by messages: their answers in parts, and their ends."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from flexmarl.actors.gateway import carried
from flexmarl.actors.gateway.carried import answer_carried
from flexmarl.actors.messages import CarriedRequest

REQUEST = CarriedRequest("POST", "/sessions/s/v1/messages", [("X-Api-Key", "k")], b"body")
HEAD = {"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]}


def body(content: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


def tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_the_application_gets_the_request_and_the_answer_comes_in_parts() -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["method"], scope["path"], scope["headers"], await receive()))
        for message in (HEAD, body(b"one"), body(b"two", more=False)):
            await send(message)

    parts = [part async for part in answer_carried(application, REQUEST)]
    asked = {"type": "http.request", "body": b"body", "more_body": False}
    assert seen == [("POST", "/sessions/s/v1/messages", [(b"x-api-key", b"k")], asked)]
    assert (parts[0].status, parts[0].headers) == (201, [("a", "b")])
    assert [part.body for part in parts[1:]] == [b"one", b"two"]
    assert not tasks()


async def test_the_end_of_the_stream_ends_the_request() -> None:
    ends: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        await receive()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async with aclosing(answer_carried(application, REQUEST)) as parts:
        assert (await anext(parts)).status == 201
        await asyncio.sleep(0)
    assert (ends, tasks()) == (["cancelled"], set())


async def test_a_slow_reader_slows_the_answer_and_may_go_at_any_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carried, "_PARTS", 3)
    sent = 0

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send(HEAD)
        while True:
            await send(body(b"x"))
            sent += 1

    async with aclosing(answer_carried(application, REQUEST)) as parts:
        await anext(parts)
        for _ in range(100):
            await asyncio.sleep(0)
        assert sent == 3
        for taken in range(1, 4):
            await anext(parts)
            for _ in range(100):
                await asyncio.sleep(0)
            assert sent == 3 + taken - 1, "a part is taken when the next one is asked for"
    assert not tasks()


async def test_an_error_of_the_application_is_raised_behind_its_parts() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        raise RuntimeError("it fails")

    parts = answer_carried(application, REQUEST)
    assert (await anext(parts)).status == 201
    with pytest.raises(RuntimeError, match="it fails"):
        await anext(parts)
    assert not tasks()


def test_a_request_does_not_show_its_key() -> None:
    assert "X-Api-Key" not in repr(REQUEST) and "body" not in repr(REQUEST)
