"""The HTTP side of a gateway: requests to calls of sessions, answers whole or as server-sent events.

/sessions/{session}/v1/...    the key must be the session's
/v1/...                       the key names the session
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .answer import Answer, shown_so_far
from .apis.api import Api
from .apis.table import APIS
from .model_call import ApiError, ModelCall
from .session import Session

MOST_BODY_BYTES: Final = 32 << 20
PLACES: Final = ("/sessions/{session}/v1", "/v1")


class Sessions(Protocol):
    """The sessions of a server."""

    def session(self, name: str | None, key: str) -> Session:
        """The session with this key; ``name``: that of the URL, if it has one. Raises ApiError."""
        ...


def application(sessions: Sessions) -> Starlette:
    """Serves each API of the table at both places."""
    routes = [
        Route(f"{place}{api.path}", _Calls(api, sessions), methods=["POST"])
        for place in PLACES
        for api in APIS
    ]
    routes += [Route(f"{place}/models", _models(sessions), methods=["GET"]) for place in PLACES]
    return Starlette(routes=routes)


def key_of(request: Request) -> str:
    """The key of a request, in the header of either API; empty without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "")


class _Calls:
    """Answers the requests of one API."""

    def __init__(self, api: Api, sessions: Sessions) -> None:
        self._api = api
        self._sessions = sessions

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._respond(request)
        except ApiError as error:
            response = self._failure(error)
        except (_Gone, ClientDisconnect):
            return
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        session = self._sessions.session(request.path_params.get("session"), key_of(request))
        call = self._api.read(await _body(request))
        session.agent_of(call.model)
        if call.streams:
            return StreamingResponse(self._stream(session, call), media_type="text/event-stream")
        answers = await _until_gone(request, session.answer(call))
        return JSONResponse(self._api.answer(call, answers))

    def _failure(self, error: ApiError) -> Response:
        # Programs would try again: what has failed here fails again, or costs a further turn.
        headers = {"x-should-retry": "false"}
        return JSONResponse(self._api.failure(error), error.status, headers)

    async def _stream(self, session: Session, call: ModelCall) -> AsyncIterator[bytes]:
        """The events of an answer. A program that goes ends it, and with it the turn."""
        events = self._api.events(call)
        yield events.begin()
        texts: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        task = asyncio.create_task(session.answer(call, lambda *text: texts.put_nowait(text)))
        task.add_done_callback(lambda _: texts.put_nowait((0, "")))
        sent = [_Sent() for _ in range(call.choices)]
        try:
            while not task.done():
                choice, text = await texts.get()
                reasoning, content = sent[choice].news(*shown_so_far(text, call.tools))
                if reasoning or content:
                    yield events.text(choice, reasoning, content)
            answers = task.result()
            for choice, answer in enumerate(answers):
                reasoning, content = sent[choice].news(answer.reasoning, answer.content)
                if reasoning or content:
                    yield events.text(choice, reasoning, content)
                sent[choice].check(answer)
            yield events.end(answers)
        except ApiError as error:
            yield events.failure(error)
        finally:
            if not task.cancel() and not task.cancelled():
                task.exception()  # marks it as retrieved: the program has gone before the end


class _Sent:
    """The text of a choice that the program has."""

    def __init__(self) -> None:
        self._reasoning = self._content = ""

    def news(self, reasoning: str, content: str) -> tuple[str, str]:
        """Returns the new parts of both. A turn that begins again, since its instance is lost, has no new ones at
        first."""
        new_reasoning = reasoning[len(self._reasoning) :] if reasoning.startswith(self._reasoning) else ""
        new_content = content[len(self._content) :] if content.startswith(self._content) else ""
        self._reasoning += new_reasoning
        self._content += new_content
        return new_reasoning, new_content

    def check(self, answer: Answer) -> None:
        """Raises ApiError if the program has another text than the answer's."""
        if (self._reasoning, self._content) != (answer.reasoning, answer.content):
            problem = "the turn began again at another instance, and its text has changed: ask again"
            raise ApiError(500, problem, code="text_changed")


class _Gone(Exception):
    """The program has closed the connection."""


async def _until_gone(request: Request, work: Any) -> Sequence[Answer]:
    """The result of ``work``, which ends with the connection. Raises ApiError, or _Gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            answers: Sequence[Answer] = task.result()
            return answers
        raise _Gone
    finally:
        gone.cancel()
        task.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> Mapping[str, Any]:
    """The body of a request. Raises ApiError."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MOST_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MOST_BODY_BYTES >> 20} MiB", code="too_large")
        chunks.append(chunk)
    try:
        body = json.loads(b"".join(chunks))
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    return body


def _models(sessions: Sessions) -> Any:
    async def models(request: Request) -> Response:
        try:
            session = sessions.session(request.path_params.get("session"), key_of(request))
        except ApiError as error:
            return JSONResponse(APIS[0].failure(error), error.status)
        listed = [
            {"id": model, "object": "model", "created": int(time.time()), "owned_by": "flexmarl"}
            for model in session.models
        ]
        return JSONResponse({"object": "list", "data": listed})

    return models
