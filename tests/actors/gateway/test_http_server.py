"""The bounds of a request's head, and the end of a server."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import pytest

from flexmarl.actors.gateway.gateway import Gateway
from flexmarl.actors.gateway.http_request import Receive, Scope, Send
from flexmarl.actors.gateway.http_server import MOST_HEAD_BYTES, serve

from ...patience import PATIENCE_S
from .clients import QUESTION, RESULT, scripted

CHUNKED = b"POST /v1/models HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def connection_to(gateway: Gateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = gateway.url.split("/")[2].partition(":")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.close()


def endless(begin: bytes, part: bytes) -> Iterable[bytes]:
    yield begin
    for _ in range(256 * MOST_HEAD_BYTES // len(part)):
        yield part


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"GET /v1/models HTTP/1.1\r\n", b"x-more: %s\r\n" % (b"x" * 1000)),
        (b"GET /v1/models HTTP/1.1\r\nx-more: ", b"x" * 1000),
        (b"GET /v1/", b"x" * 1000),
        (CHUNKED + b"0\r\n", b"x-more: %s\r\n" % (b"x" * 1000)),
        (CHUNKED + b"1;more=", b"x" * 1000),
    ],
    ids=["headers", "a header", "a path", "trailers", "the size of a part"],
)
async def test_a_head_without_end_is_refused(begin: bytes, part: bytes) -> None:
    async with scripted() as (gateway, _), connection_to(gateway) as (reader, writer):
        reading = asyncio.create_task(reader.read())
        with suppress(ConnectionError):  # it is refused before all of it is written
            for data in endless(begin, part):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)  # the server reads in this loop, and ``drain`` need not wait
                if reading.done():
                    break
            else:
                pytest.fail("all of it was taken")
        with suppress(ConnectionError):
            assert (await reading)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 404", b"HTTP/1.1 405", b"")


async def test_a_large_body_before_a_further_head_is_none() -> None:
    """The end of the first request and the begin of the second one come in one part."""
    body = '{"model": "solver", "messages": [{"role": "user", "content": "%s"}]}'
    async with scripted(RESULT, RESULT) as (gateway, solver), connection_to(gateway) as (reader, writer):
        key = f"authorization: Bearer {gateway.key}"
        wholes = [body % content for content in ("x" * 2 * MOST_HEAD_BYTES, QUESTION)]
        requests = "".join(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n{key}\r\ncontent-length: {len(whole)}\r\n\r\n{whole}"
            for whole in wholes
        ).encode()
        cut = requests.rindex(b"content-length")
        writer.write(requests[:cut])
        await writer.drain()
        for number in range(2):
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            if not number:
                writer.write(requests[cut:])
        assert len(solver.prompts) == 2


async def stream_for_ever(_scope: Scope, receive: Receive, send: Send) -> None:
    """Ends when its client is gone."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"news", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


async def test_a_stream_ends_with_its_server_and_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    before = asyncio.all_tasks()
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(PATIENCE_S), serve(stream_for_ever, listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
            await reader.readuntil(b"news")
        assert asyncio.all_tasks() == before and caplog.records == []
        await reader.read()
        writer.close()
