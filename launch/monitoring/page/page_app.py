"""The web application of the live page: read-only, behind a key in its address.

It serves its own modules and the data of the panels, and announces changes of the runs' folders by server-sent events.
A browser that shows it gets no other address, no script but these, and no text as HTML.
"""

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ....actors.errors import ConfigError
from ...errors import InvalidCondition, RunDirectoryError, SamplesUnreadable
from .changes import Changes, TooManyListeners
from .curves import points_of
from .panels import PANELS, Panel, View
from .plain import plain
from .recorded_run import RecordedRun
from .trajectories_panel import InvalidName

WEB: Final = Path(__file__).with_name("web")
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_TYPES: Final = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", "": "text/plain",
}  # fmt: skip
_MOST_KEYS: Final = 400
_LONGEST_PLACE: Final = 9


def application(runs: Sequence[RecordedRun], key: str, changes: Changes) -> ASGIApp:
    """``key``: the first part of every path."""
    pages = _Pages(runs, changes)
    files = sorted(path for path in WEB.rglob("*") if path.is_file())
    routes = [
        Route("/", pages.index),
        Route("/page.json", pages.page),
        Route("/changes", pages.changes),
        Route("/curves", pages.curves),
        *(Route(f"/panels/{panel.name}.json", pages.panel(panel)) for panel in PANELS),
        *(Route(f"/{path.relative_to(WEB)}", _file(path)) for path in files),
    ]
    return _Guarded(Starlette(routes=[Mount("/{key}", routes=routes)]), key)


class _Guarded:
    """Gives requests without the key one answer for all paths, and all answers the headers."""

    def __init__(self, application: ASGIApp, key: str) -> None:
        self._application = application
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        key = scope["path"].split("/")[1]
        if not secrets.compare_digest(key.encode(errors="replace"), self._key):
            words = "The key in this address is not the one of this page: copy the whole address that was printed.\n"
            await PlainTextResponse(words, 403, _HEADERS)(scope, receive, send)
            return
        if scope["method"] not in ("GET", "HEAD"):
            await PlainTextResponse("This page can be read only.\n", 405, _HEADERS)(scope, receive, send)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                kept = [pair for pair in message["headers"] if pair[0].decode() not in _HEADERS]
                message = {**message, "headers": kept + headers}
            await send(message)

        await self._application(scope, receive, send_guarded)


class _Pages:
    def __init__(self, runs: Sequence[RecordedRun], changes: Changes) -> None:
        self._runs = runs
        self._changes = changes

    async def index(self, request: Request) -> Response:
        """The frame, which loads the modules."""
        return FileResponse(WEB / "index.html", media_type="text/html")

    async def page(self, request: Request) -> Response:
        """The runs and the panels."""
        revisions = await self._changes.revisions()
        return _json(page_facts(self._runs, revisions))

    async def changes(self, request: Request) -> Response:
        """The revisions of the runs, each time that one of them grows."""

        return _News(self._changes)

    async def curves(self, request: Request) -> Response:
        """Thinned curves by their keys, one a line."""
        keys = [key for key in request.query_params.get("keys", "").split("\n") if key][:_MOST_KEYS]
        return await self._of_run(request, lambda run, query: points_of(run.curves, keys, query))

    def panel(self, panel: Panel) -> Any:
        """A route's function that answers with the panel's values."""

        async def answer(request: Request) -> Response:
            return await self._of_run(request, panel.view, locks=not panel.has_own_lock)

        return answer

    async def _of_run(self, request: Request, view: View, *, locks: bool = True) -> Response:
        place = request.query_params.get("run", "0")
        if len(place) > _LONGEST_PLACE:
            words = (
                f"run={place[:_LONGEST_PLACE]}... is not the place of a run: it has {len(place)} characters"
            )
            return _json({"error": words}, 400)
        if not place.isdecimal() or int(place) >= len(self._runs):
            return _json({"error": f"there is no run {place}"}, 404)
        run = self._runs[int(place)]

        def values() -> Any:
            with run.reading() if locks else nullcontext():
                return view(run, request.query_params)

        try:
            return _json(await run_in_threadpool(values))
        except InvalidName as error:
            return _json({"error": str(error)}, 400)
        except (SamplesUnreadable, InvalidCondition, RunDirectoryError, ConfigError, OSError) as error:
            return _json({"error": str(error)}, 422)


class _News(StreamingResponse):
    """A connection of a page that is open: the revisions of the runs, each time that one of them grows."""

    def __init__(self, changes: Changes) -> None:
        super().__init__(self._lines(), media_type="text/event-stream")
        self._changes = changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._changes.listening():
                await super().__call__(scope, receive, send)
        except TooManyListeners as error:  # before the first byte
            await PlainTextResponse(f"{error}\n", 503, {"retry-after": "60"})(scope, receive, send)

    async def _lines(self) -> AsyncIterator[str]:
        async with self._changes.watched() as news:
            async for revisions in news:
                yield f"data: {json.dumps(revisions)}\n\n" if revisions else ": still here\n\n"


def page_facts(runs: Sequence[RecordedRun], revisions: Sequence[int]) -> dict[str, Any]:
    """All that the frame needs to draw itself."""
    return {
        "runs": [{"name": run.name, "path": str(run.path)} for run in runs],
        "panels": [{"name": panel.name, "title": panel.title} for panel in PANELS],
        "revisions": list(revisions),
    }


def _file(path: Path) -> Any:
    async def answer(request: Request) -> Response:
        return FileResponse(path, media_type=_TYPES[path.suffix])

    return answer


def _json(value: Any, status: int = 200) -> Response:
    text = json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
    return Response(text, status, media_type="application/json")
