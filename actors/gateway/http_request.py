"""A request of a program to a gateway's server, as ASGI has it, and its answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final

from .model_call import ApiError

MOST_BODY_BYTES: Final = 32 << 20
BODY_S: Final = 60.0
"""The time for a request to come."""
SEND_S: Final = 60.0
"""The time for a part of an answer to be taken."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Failure = Callable[[ApiError], dict[str, Any]]


class HttpRequest:
    """A request of a program. ``session``: the name in the URL, or None. ``path``: the part behind ``/v1``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self.session, self.path = _place(scope["path"])
        self._scheme: str = scope.get("scheme", "http")
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

    @property
    def base_url(self) -> str:
        """The address that it was sent to."""
        host = self.headers.get(b"host", b"").decode("latin-1")
        return f"{self._scheme}://{host}"

    async def body(self) -> Mapping[str, Any]:
        """Raises ApiError, and Gone."""
        try:
            body = json.loads(await self.content(MOST_BODY_BYTES))
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object")
        return body

    async def content(self, most: int) -> bytes:
        """The bytes of its body, at most so many. Raises ApiError, and Gone."""
        try:
            async with asyncio.timeout(BODY_S):
                return await self._content(most)
        except TimeoutError:
            raise ApiError(408, f"the body has not come within {BODY_S:g} s", code="timeout") from None

    async def _content(self, most: int) -> bytes:
        chunks: list[bytes] = []
        size = int(self.headers.get(b"content-length", b"0"))
        more = True
        while more:
            if size > most:
                raise ApiError(413, f"the body has more than {most >> 20} MiB", code="too_large")
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            chunks.append(message.get("body", b""))
            more = message.get("more_body", False)
            if more:
                size = max(size, sum(map(len, chunks)))
        return b"".join(chunks)

    async def until_gone(self) -> None:
        """Returns when the program has closed the connection."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the head of the answer."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes, *, more: bool = False) -> None:
        """Sends a part of the answer. Raises Gone if the program does not take it."""
        try:
            async with asyncio.timeout(SEND_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except (TimeoutError, OSError):
            raise Gone from None

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


class Gone(Exception):
    """The program has closed the connection, or takes no more of its answer."""


def check_method(request: HttpRequest, method: str) -> None:
    """Raises ApiError."""
    if request.method != method:
        raise ApiError(405, f"{request.method} is not served here, {method} is", code="method_not_allowed")


async def refuse(request: HttpRequest, error: ApiError, failure: Failure) -> None:
    """Answers with an error, in the form of the API."""
    # Clients would try again by themselves.
    headers = [(b"x-should-retry", b"false")]
    if error.retry_s is not None:
        headers = [(b"retry-after", str(error.retry_s).encode())]
    if error.status in (408, 413):  # the rest of the body may still come
        headers.append((b"connection", b"close"))
    try:
        await request.send_json(failure(error), error.status, tuple(headers))
    except Gone:
        pass


@asynccontextmanager
async def until_gone(request: HttpRequest, work: Any) -> Any:
    """The result of ``work``, which ends with the connection. Raises ApiError, or Gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(request.until_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        yield task.result()
    finally:
        gone.cancel()
        if task.cancel():
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # marks it as retrieved: no one is there to be answered
