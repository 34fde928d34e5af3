"""The HTTP side of a gateway: requests to calls of sessions, answers whole or as server-sent events.

/sessions/{session}/v1/...    the key must be the session's
/v1/...                       the key names the session

It speaks ASGI itself: a framework's routes and requests would be most of what a call costs.
"""

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol

from .answer import Answer, SentText
from .apis.anthropic_messages import anthropic_failure
from .apis.api import AnswerEvents, Api
from .apis.models import anthropic_models, openai_models
from .apis.openai_common import openai_failure
from .apis.table import APIS
from .http_request import (
    Application,
    Failure,
    Gone,
    HttpRequest,
    Receive,
    Scope,
    Send,
    check_method,
    refuse,
    until_gone,
)
from .model_call import ApiError, ModelCall
from .session import Session

_APIS: Final[Mapping[str, Api]] = {api.path: api for api in APIS}
MOST_OPEN_REQUESTS: Final = 8192
"""At once, of all sessions."""


class Sessions(Protocol):
    """The sessions of a server."""

    def session(self, name: str | None, key: str) -> Session:
        """The session with this key; ``name``: that of the URL, if it has one. Raises ApiError."""
        ...


def application(sessions: Sessions) -> Application:
    """Serves each API of the table at both places."""
    return _Gateway(sessions)


class _Gateway:
    """Answers all requests of a server."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive, send)
        api = _APIS.get(request.path)
        self._open += 1
        try:
            await (self._other(request) if api is None else self._call(request, api))
        except ApiError as error:
            await refuse(request, error, failure_of(request))
        except Gone:
            pass  # no one is there to be answered
        finally:
            self._open -= 1

    async def _call(self, request: HttpRequest, api: Api) -> None:
        """Answers a request of one of the APIs."""
        check_method(request, "POST")
        session = self._sessions.session(request.session, request.key)
        session.admit()
        if self._open > MOST_OPEN_REQUESTS:
            problem = f"{MOST_OPEN_REQUESTS} requests are under way"
            raise ApiError(429, problem, code="too_many_calls", retry_s=1)
        body = await request.body()
        with session.keeping_refusal():
            call = api.read(body, session.earlier)
            session.agent_of(call.model)
        if call.streams:
            await _Stream(request, session, call, api.events(call)).run()
            return
        async with until_gone(request, session.answer(call)) as answers:
            await request.send_json(api.answer(call, answers))

    async def _other(self, request: HttpRequest) -> None:
        """Answers a request of no API."""
        path, _, model = request.path.removeprefix("/").partition("/")
        if path == "models":
            check_method(request, "GET")
            session = self._sessions.session(request.session, request.key)
            if model:
                session.agent_of(model)
            listed = anthropic_models if request.is_anthropic else openai_models
            await request.send_json(listed([*session.models], model))
            return
        if request.path == "/messages/count_tokens":
            raise ApiError(404, "tokens are counted where a turn is generated: see the usage of an answer")
        served = ", ".join(f"/v1{path}" for path in (*_APIS, "/models"))
        raise ApiError(404, f"there is no such path; there is: {served}", code="not_found")


def failure_of(request: HttpRequest) -> Failure:
    """Writes errors in the form of the API that the request is for."""
    if (api := _APIS.get(request.path)) is not None:
        return api.failure
    return anthropic_failure if request.is_anthropic else openai_failure


class _Stream:
    """An answer as server-sent events. A program that goes ends it, and with it the turn."""

    def __init__(self, request: HttpRequest, session: Session, call: ModelCall, events: AnswerEvents) -> None:
        self._request = request
        self._session = session
        self._call = call
        self._events = events
        self._sent = [SentText(call) for _ in range(call.choices)]
        self._latest: dict[int, str] = {}
        """The texts of the choices of which some is not sent."""
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Sends the whole answer. Raises ApiError if it fails before its first event, and Gone."""
        work = asyncio.create_task(self._session.answer(self._call, self))
        gone = asyncio.create_task(self._request.until_gone())
        for task in (work, gone):
            task.add_done_callback(lambda _: self._news.set())
        try:
            await self._news.wait()
            if work.done() and (error := work.exception()) is not None:
                raise error
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await self._request.begin(200, headers)
            await self._request.send(self._events.begin(), more=True)
            while not work.done():
                if gone.done():
                    raise Gone
                await self._send_texts()
                await self._news.wait()
            await self._request.send(self._end(work))
        finally:
            gone.cancel()
            if not work.cancel() and not work.cancelled():
                work.exception()  # marks it as retrieved: the program has gone before the end

    def hear(self, choice: int, text: str) -> None:
        """See ``Listener``."""
        self._latest[choice] = text
        self._news.set()

    def agreed(self, choice: int, answer: Answer) -> Answer:
        """See ``Listener``."""
        return self._sent[choice].agreed(answer)

    async def _send_texts(self) -> None:
        """Sends what is new of all choices. A text that came in many parts meanwhile is sent as one."""
        self._news.clear()
        latest, self._latest = self._latest, {}
        events = b""
        for choice, text in latest.items():
            reasoning, content = self._sent[choice].take_unsent(text)
            if reasoning or content:
                events += self._events.text(choice, reasoning, content)
        if events:
            await self._request.send(events, more=True)

    def _end(self, work: asyncio.Task[list[Answer]]) -> bytes:
        """The last events."""
        try:
            answers = work.result()
        except ApiError as error:
            return self._events.failure(error)
        events = b""
        for choice, answer in enumerate(answers):
            reasoning, content = self._sent[choice].rest(answer)
            if reasoning or content:
                events += self._events.text(choice, reasoning, content)
        return events + self._events.end(answers)
