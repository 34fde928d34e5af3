"""A program's request that comes by a message, and not by a connection: from the run's gateway, on any host.

connection ─> the run's gateway ─ message ─> the worker that has the session, or serves the agents: its ASGI application
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from ..messages import CarriedAnswer, CarriedRequest
from .http_request import Application

_PARTS: Final = 64
"""Those that wait to be taken: a slow reader slows the answer."""


async def answer_carried(application: Application, request: CarriedRequest) -> AsyncGenerator[CarriedAnswer]:
    """The answer of an ASGI application, in parts. Closing it ends the request, as a connection's end does."""
    gone = asyncio.Event()
    parts: asyncio.Queue[CarriedAnswer | None] = asyncio.Queue()
    room = asyncio.Semaphore(_PARTS)
    bodies = iter([{"type": "http.request", "body": request.body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (body := next(bodies, None)) is not None:
            return body
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]
            ]
            parts.put_nowait(CarriedAnswer(status=message["status"], headers=headers))
        elif body := message.get("body"):
            await room.acquire()
            parts.put_nowait(CarriedAnswer(bytes(body)))

    work = application(_scope(request), receive, send)
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        while (part := await parts.get()) is not None:
            yield part
            if not part.status:
                room.release()
        task.result()  # raises its error
    finally:
        gone.set()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # marks it as retrieved: no one reads the rest of the answer


def _scope(request: CarriedRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers
        ],
    }
