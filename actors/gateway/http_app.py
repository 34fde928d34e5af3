"""The HTTP side of a gateway: requests to calls of sessions, answers whole or as server-sent events.

/sessions/{session}/v1/...    the key must be the session's
/v1/...                       the key names the session

It speaks ASGI itself: a framework's routes and requests would be most of what a call costs.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from .answer import Answer, SentText
from .apis.anthropic_messages import anthropic_failure
from .apis.api import AnswerEvents, Api
from .apis.models import anthropic_models, openai_models
from .apis.openai_common import openai_failure
from .apis.table import APIS
from .model_call import ApiError, ModelCall
from .session import Session

MOST_BODY_BYTES: Final = 32 << 20
MOST_OPEN_REQUESTS: Final = 8192
"""At once, of all sessions."""
BODY_S: Final = 60.0
"""The time for a request to come."""
SEND_S: Final = 60.0
"""The time for a part of an answer to be taken."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Failure = Callable[[ApiError], dict[str, Any]]


class Sessions(Protocol):
    """The sessions of a server."""

    def session(self, name: str | None, key: str) -> Session:
        """The session with this key; ``name``: that of the URL, if it has one. Raises ApiError."""
        ...


def application(sessions: Sessions) -> Application:
    """Serves each API of the table at both places."""
    return _Gateway(sessions)


class _Request:
    """``session``: that of the URL, if it has one. ``path``: behind the ``/v1``; empty if there is none."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self.session, self.path = _place(scope["path"])
        self._send = send

    @property
    def key(self) -> str:
        """In the header of either API; empty without one."""
        scheme, _, key = self.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
        return self.headers.get(b"x-api-key", b"").decode("latin-1")

    @property
    def is_anthropic(self) -> bool:
        """True if a client of Anthropic's API sends it."""
        return b"anthropic-version" in self.headers

    async def body(self) -> Mapping[str, Any]:
        """Raises ApiError, and _Gone."""
        try:
            async with asyncio.timeout(BODY_S):
                content = await self._content()
        except TimeoutError:
            raise ApiError(408, f"the body has not come within {BODY_S:g} s", code="timeout") from None
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object")
        return body

    async def _content(self) -> bytes:
        content = b""
        chunks: list[bytes] = []
        size = int(self.headers.get(b"content-length", b"0"))
        more = True
        while more:
            if size > MOST_BODY_BYTES:
                raise ApiError(413, f"the body has more than {MOST_BODY_BYTES >> 20} MiB", code="too_large")
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunks.append(message.get("body", b""))
            more = message.get("more_body", False)
            if more:
                size = max(size, sum(map(len, chunks)))
        return content.join(chunks)

    async def until_gone(self) -> None:
        """Returns when the program has closed the connection."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the head of the answer."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes, *, more: bool = False) -> None:
        """Sends a part of the answer. Raises _Gone if the program does not take it."""
        try:
            async with asyncio.timeout(SEND_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except (TimeoutError, OSError):
            raise _Gone from None

    async def send_json(
        self, body: Mapping[str, Any], status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Sends the whole answer."""
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
        length = (b"content-length", str(len(content)).encode())
        await self.begin(status, [(b"content-type", b"application/json"), length, *headers])
        await self.send(content)


def _place(path: str) -> tuple[str | None, str]:
    """The session that a path names, and what is behind its ``/v1``."""
    session = None
    if path.startswith("/sessions/"):
        session, _, path = path.removeprefix("/sessions/").partition("/")
        path = f"/{path}"
    return session, path.removeprefix("/v1") if path.startswith("/v1/") else ""


class _Gone(Exception):
    """The program has closed the connection, or takes no more of its answer."""


class _Gateway:
    """Answers all requests of a server."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._apis = {api.path: api for api in APIS}
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Request(scope, receive, send)
        api = self._apis.get(request.path)
        self._open += 1
        try:
            await (self._other(request) if api is None else self._call(request, api))
        except ApiError as error:
            await _refuse(request, error, _failure_of(request) if api is None else api.failure)
        except _Gone:
            pass  # no one is there to be answered
        finally:
            self._open -= 1

    async def _call(self, request: _Request, api: Api) -> None:
        """Answers a request of one of the APIs."""
        _check_method(request, "POST")
        session = self._sessions.session(request.session, request.key)
        if self._open > MOST_OPEN_REQUESTS:
            raise ApiError(429, f"{MOST_OPEN_REQUESTS} requests are under way", code="too_many_calls")
        call = api.read(await request.body(), session.earlier)
        session.agent_of(call.model)
        if call.streams:
            await _Stream(request, session, call, api.events(call)).run()
            return
        async with _until_gone(request, session.answer(call)) as answers:
            await request.send_json(api.answer(call, answers))

    async def _other(self, request: _Request) -> None:
        """Answers a request of no API."""
        path, _, model = request.path.removeprefix("/").partition("/")
        if path == "models":
            _check_method(request, "GET")
            session = self._sessions.session(request.session, request.key)
            if model:
                session.agent_of(model)
            listed = anthropic_models if request.is_anthropic else openai_models
            await request.send_json(listed([*session.models], model))
            return
        if request.path == "/messages/count_tokens":
            raise ApiError(404, "tokens are counted where a turn is generated: see the usage of an answer")
        served = ", ".join(f"/v1{path}" for path in (*self._apis, "/models"))
        raise ApiError(404, f"there is no such path; there is: {served}", code="not_found")


def _failure_of(request: _Request) -> Failure:
    return anthropic_failure if request.is_anthropic else openai_failure


def _check_method(request: _Request, method: str) -> None:
    """Raises ApiError."""
    if request.method != method:
        raise ApiError(405, f"{request.method} is not served here, {method} is", code="method_not_allowed")


async def _refuse(request: _Request, error: ApiError, failure: Failure) -> None:
    # Programs would try again: what has failed here fails again, or costs a further turn.
    headers = [(b"x-should-retry", b"false")]
    if error.status in (408, 413):  # the rest of the body may still come
        headers.append((b"connection", b"close"))
    try:
        await request.send_json(failure(error), error.status, tuple(headers))
    except _Gone:
        pass


@asynccontextmanager
async def _until_gone(request: _Request, work: Any) -> Any:
    """The result of ``work``, which ends with the connection. Raises ApiError, or _Gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(request.until_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Gone
        yield task.result()
    finally:
        gone.cancel()
        task.cancel()


class _Stream:
    """An answer as server-sent events. A program that goes ends it, and with it the turn."""

    def __init__(self, request: _Request, session: Session, call: ModelCall, events: AnswerEvents) -> None:
        self._request = request
        self._session = session
        self._call = call
        self._events = events
        self._sent = [SentText(call) for _ in range(call.choices)]
        self._latest: dict[int, str] = {}
        """The texts of the choices of which some is not sent."""
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Sends the whole answer. Raises ApiError if it fails before its first event, and _Gone."""
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
                    raise _Gone
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
            reasoning, content = self._sent[choice].news(text)
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
