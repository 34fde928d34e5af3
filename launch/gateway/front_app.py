"""The HTTP side of the run's gateway.

POST   /sessions                    the service's key: opens a session
GET    /sessions/{id}               its state
POST   /sessions/{id}/rewards       ends it with rewards
DELETE /sessions/{id}               ends it without any
any    /sessions/{id}/v1/..., /v1/...   the session's key: carried to its worker
"""

from contextlib import aclosing
from typing import Final, Protocol

from ...actors.gateway.http_app import failure_of
from ...actors.gateway.http_request import (
    MOST_BODY_BYTES,
    Application,
    Gone,
    HttpRequest,
    Receive,
    Scope,
    Send,
    refuse,
    until_gone,
)
from ...actors.gateway.model_call import ApiError
from ...actors.messages import CarriedRequest, SessionRewards
from ...core.errors import FlexmarlError
from .call_route import CallRoute
from .session_front import SessionFront
from .session_request import MOST_ORDER_BYTES, RewardsRequest, SessionRequest, read_body

_CARRIED: Final = (b"content-type", b"anthropic-version")
"""The headers that an answer depends on; others may be secrets of the program."""
_MOST_CARRIED: Final = 4096
"""Requests of all programs at once."""


class Calls(Protocol):
    """A gateway for programs."""

    def check_service(self, key: str) -> None:
        """Raises ApiError for another key than that of services."""
        ...

    async def route(self, name: str | None, key: str) -> CallRoute:
        """The way of a request. ``name``: of the session in its URL, if that has one. Raises ApiError."""
        ...


def application(front: Calls) -> Application:
    """Serves ``front``; services open sessions if that is a SessionFront."""
    return _FrontApp(front)


class _FrontApp:
    """Answers all requests of a run's gateway."""

    def __init__(self, front: Calls) -> None:
        self._front = front
        self._carried = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive, send)
        try:
            await (self._carry(request) if request.path else self._of_service(request, scope["path"]))
        except ApiError as error:
            await refuse(request, error, failure_of(request))
        except Gone:
            pass  # no one is there to be answered

    async def _of_service(self, request: HttpRequest, path: str) -> None:
        self._front.check_service(request.key)
        if not isinstance(self._front, SessionFront):
            raise ApiError(409, "the agents are served without sessions: ask /v1", code="no_sessions")
        await _Service(self._front).answer(request, path)

    async def _carry(self, request: HttpRequest) -> None:
        """Carries one, until the worker's answer has ended or the program has gone."""
        route = await self._front.route(request.session, request.key)
        if self._carried >= _MOST_CARRIED:
            raise ApiError(429, f"{_MOST_CARRIED} requests are under way", code="too_many_calls", retry_s=1)
        self._carried += 1
        try:
            body = await request.content(MOST_BODY_BYTES)
            headers = [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in request.headers.items()
                if name in _CARRIED
            ]
            headers.append(("authorization", f"Bearer {route.key}"))
            carried = CarriedRequest(request.method, f"{route.prefix}/v1{request.path}", headers, body)
            async with until_gone(request, _answer(request, route, carried)):
                pass
        finally:
            self._carried -= 1


class _Service:
    """Answers the requests of those that have the gateway's key."""

    def __init__(self, front: SessionFront) -> None:
        self._front = front

    async def answer(self, request: HttpRequest, path: str) -> None:
        """Raises ApiError, and Gone."""
        match request.method, path.strip("/").split("/"):
            case "POST", ["sessions"]:
                await self._open(request)
            case "GET", ["sessions", name]:
                await request.send_json(self._front.session(name).for_service())
            case "DELETE", ["sessions", name]:
                await self._settle(request, name, None)
            case "POST", ["sessions", name, "rewards"]:
                self._front.session(name)
                order = read_body(RewardsRequest, await request.content(MOST_ORDER_BYTES))
                await self._settle(request, name, order.rewards())
            case method, _:
                raise ApiError(404, f"{method} {path} is not served here", code="not_found")

    async def _open(self, request: HttpRequest) -> None:
        order = read_body(SessionRequest, await request.content(MOST_ORDER_BYTES))
        async with until_gone(request, self._front.open(order)) as session:
            url = f"{request.base_url}/sessions/{session.name}"
            opened = {**session.for_service(), "url": url, "key": session.key, "models": session.terms.models}
            await request.send_json(opened, 201)

    async def _settle(self, request: HttpRequest, name: str, rewards: SessionRewards | None) -> None:
        session = await self._front.settle(name, rewards)
        await request.send_json(session.for_service(), 200 if session.has_ended else 202)


async def _answer(request: HttpRequest, route: CallRoute, carried: CarriedRequest) -> None:
    begun = False
    async with aclosing(route.carry(carried)) as parts:
        try:
            async for part in parts:
                if part.status:
                    begun = True
                    pairs = [
                        (name.encode("latin-1"), value.encode("latin-1")) for name, value in part.headers
                    ]
                    await request.begin(part.status, pairs)
                else:
                    await request.send(part.body, more=True)
        except FlexmarlError as error:
            if not begun:
                raise ApiError(502, str(error), code="worker_failed") from error
            raise  # the server ends the connection: the program sees that the answer is not whole
        await request.send(b"")
