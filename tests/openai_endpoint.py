"""A server with the OpenAI API, in a thread, whose model reads its prompt backwards."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .patience import PATIENCE_S


@dataclass
class Endpoint:
    """``base_url``: ``.../v1``. ``requests``: path, body and key of each. ``answers``: the next ones, in the place of
    the model's."""

    base_url: str = ""
    requests: list[tuple[str, dict[str, Any], str | None]] = field(default_factory=list)
    answers: list[Response] = field(default_factory=list)
    held: threading.Event | None = None
    """Answers wait until it is set."""

    def complete(self, request: Request, body: dict[str, Any]) -> Response:
        self.requests.append((request.url.path, body, request.headers.get("authorization")))
        if self.held is not None:
            self.held.wait(PATIENCE_S)
        if self.answers:
            return self.answers.pop(0)
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        text = prompt[::-1][: body["max_tokens"]]
        reason = "length" if len(text) < len(prompt) else "stop"
        choice = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
        if body.get("stream"):
            deltas = [{"text": each} if "prompt" in body else {"delta": {"content": each}} for each in text]
            return streamed(*deltas, reason=reason)
        return JSONResponse({"choices": [{**choice, "finish_reason": reason}]})


def streamed(*choices: dict[str, Any], reason: str | None) -> Response:
    """An answer in server-sent events. ``reason``: None for one that breaks off."""
    events = [{"choices": [{**choice, "finish_reason": None}]} for choice in choices]
    if reason is not None:
        last: dict[str, Any] = {"text": ""} if "text" in choices[-1] else {"delta": {}}
        events.append({"choices": [{**last, "finish_reason": reason}]})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return Response("".join([": hello\n\n", *lines, "data: [DONE]\n\n"]), media_type="text/event-stream")


@contextmanager
def served_endpoint() -> Iterator[Endpoint]:
    """An endpoint that answers until the end of the context."""
    endpoint = Endpoint()

    async def answer(request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        return await run_in_threadpool(endpoint.complete, request, await request.json())

    routes = [Route(f"/v1/{path}", answer, methods=["POST"]) for path in ("completions", "chat/completions")]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, lifespan="off", timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while not server.started:
                if not thread.is_alive() or time.monotonic() > deadline_s:
                    pytest.fail("the endpoint does not start")
                time.sleep(0.01)
            yield endpoint
        finally:
            if endpoint.held is not None:
                endpoint.held.set()
            server.should_exit = True
            thread.join(PATIENCE_S)
