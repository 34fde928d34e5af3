"""A web service around a run that another process trains: its progress, and a judge of its samples.

    pip install 'flexmarl[service]'
    python -m flexmarl.launch.examples.service runs/first --port 8000

    GET  /status            as JSON
    GET  /steps?after=N     server-sent events: each step after step N (without N: from now on), and ``end`` at the end
                            of the run; a browser that has lost the connection gets the steps that it has missed
    GET  /samples           those that wait for a verdict
    POST /verdicts          {"1:q0_0_3": 0.5, ...}: written into the external column of these samples
    POST /queries           [{"id": "chat-17", "text": "2+2", "data": {}}, ...]: trained in the next step; the answer,
                            once they are rolled out, has the rewards of each

The run's config has the column (``written_by: external``). Everyone who reaches the port may judge: put your service's
own login in front of it.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import click
import uvicorn
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ...actors.errors import StoreError
from ...actors.messages import Query
from ...core.errors import CallNotAllowed, FlexmarlError
from ..errors import RunFailed
from ..run.connected_run import ConnectedRun, connect
from ..run_folder.json_lines import metrics_to_json

Endpoint = Callable[[Request], Awaitable[Response]]

_QUERIES: TypeAdapter[list[Query]] = TypeAdapter(list[Query])
_VERDICTS: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, float])


def application(run: Path | str, agent: str, column: str) -> Starlette:
    """The service for ``run`` (see ``flexmarl.connect``), which judges samples of ``agent`` by writing ``column``."""
    service = _Service(agent, column)
    return Starlette(
        routes=[
            Route("/status", service.status),
            Route("/steps", service.steps),
            Route("/samples", service.samples),
            Route("/verdicts", service.verdicts, methods=["POST"]),
            Route("/queries", service.queries, methods=["POST"]),
        ],
        lifespan=lambda app: service.connected(run),
        exception_handlers={FlexmarlError: _refuse, ValidationError: _refuse},
    )


class _Service:
    def __init__(self, agent: str, column: str) -> None:
        self._agent, self._column = agent, column
        self._run: ConnectedRun

    @asynccontextmanager
    async def connected(self, run: Path | str) -> AsyncIterator[None]:
        async with connect(run) as self._run:
            yield

    async def status(self, request: Request) -> Response:
        return JSONResponse(asdict(await self._run.status()))

    async def steps(self, request: Request) -> Response:
        seen = request.headers.get("last-event-id") or request.query_params.get("after")
        if seen is not None and not seen.isdigit():
            return JSONResponse({"error": f"after={seen}: the number of a step is wanted"}, 422)
        return StreamingResponse(
            self._step_events(None if seen is None else int(seen)), media_type="text/event-stream"
        )

    async def _step_events(self, after: int | None) -> AsyncIterator[str]:
        """The events as HTML's standard has them (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
        async with aclosing(self._run.steps(after)) as steps:
            try:
                async for step in steps:
                    yield f"id: {step.step}\ndata: {json.dumps(metrics_to_json(step))}\n\n"
                problem = None
            except RunFailed as error:
                problem = str(error)
        yield f"event: end\ndata: {json.dumps({'error': problem})}\n\n"

    async def samples(self, request: Request) -> Response:
        where = f"agent = '{self._agent}' and status = 'writing' and {self._column} is null"
        return JSONResponse(await self._run.samples(where))

    async def verdicts(self, request: Request) -> Response:
        verdicts = _VERDICTS.validate_json(await request.body())
        scores = [*verdicts.values()]
        await self._run.write(self._agent, {"sample_id": [*verdicts], self._column: scores})
        return JSONResponse({"written": len(verdicts)})

    async def queries(self, request: Request) -> Response:
        answers = await self._run.submit(_QUERIES.validate_json(await request.body()))
        return JSONResponse([{**asdict(answer), "rewards": answer.rewards} for answer in answers])


async def _refuse(request: Request, error: Exception) -> Response:
    """422: the request is invalid; 403: the run does not allow it to this service; 503: the run has ended."""
    status = 403 if isinstance(error, CallNotAllowed) else 503
    if isinstance(error, (StoreError, ValidationError)):
        status = 422
    return JSONResponse({"error": str(error)}, status)


@click.command()
@click.argument("run")
@click.option("--agent", default="solver", show_default=True)
@click.option("--column", default="judged", show_default=True)
@click.option("--port", default=8000, show_default=True)
def main(run: str, agent: str, column: str, port: int) -> None:
    """Serve RUN, the folder or an address file of a run, on this host."""
    uvicorn.run(application(run, agent, column), port=port, timeout_graceful_shutdown=2)


if __name__ == "__main__":
    main()
