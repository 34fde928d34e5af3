"""The example service: a real server, real requests, and a run that trains only as its samples are judged."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
import uvicorn

from flexmarl.launch.examples.service import application

from ...patience import PATIENCE_S
from ..conftest import SIMULATED, Launched, Launcher, wait_until

JUDGED = (
    "agents.solver.columns.judged={type: float, required: true, written_by: external,"
    f" timeout_s: {PATIENCE_S}}}"
)


@pytest.fixture(autouse=True)
async def _deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


@asynccontextmanager
async def served(run: Launched) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the service, which runs under uvicorn."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = application(run.directory, "solver", "judged")
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=2)
        )
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started:
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                yield client
        finally:
            server.should_exit = True
            await serving


async def events_of(client: httpx2.AsyncClient, **headers: str) -> list[tuple[str, Any]]:
    """The id or name and the data of each server-sent event, until the last one."""
    found = []
    async with client.stream("GET", "/steps", params={"after": 0}, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines()]
    for head, data, blank in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert not blank
        found.append((head, json.loads(data.removeprefix("data: "))))
    return found


async def judge(client: httpx2.AsyncClient) -> dict[str, float]:
    """Judges samples over HTTP until the run has ended."""
    verdicts: dict[str, float] = {}
    while (waiting := await client.get("/samples")).status_code == 200:
        new = {row["sample_id"]: row["reward"] / 2 for row in waiting.json()}
        if new:
            answer = await client.post("/verdicts", json=new)
            assert (answer.status_code, answer.json()) == (200, {"written": len(new)})
            verdicts |= new
    assert waiting.status_code == 503 and "error" in waiting.json()
    return verdicts


async def test_a_run_trains_as_its_samples_are_judged_over_http(launcher: Launcher) -> None:
    run = launcher.train("served", *SIMULATED, "training.steps=3", JUDGED)
    address = run.directory / "address"
    await asyncio.to_thread(
        wait_until, lambda: address.exists() or run.process.poll() is not None, "its address"
    )
    assert address.exists(), run.text
    async with served(run) as client:
        status = (await client.get("/status")).json()
        assert status["steps"] == 3 and status["instances"] == {"solver": 1}
        for body, why in (
            ({"none": 1.0}, "there is no sample 'none'"),
            ({"1:q000_0_0": "high"}, "valid number"),
        ):
            answer = await client.post("/verdicts", json=body)
            assert answer.status_code == 422 and why in answer.json()["error"]
        assert (await client.get("/steps", params={"after": "x"})).status_code == 422
        assert (await client.post("/queries", json=[{"id": "mine"}])).status_code == 422
        mine = {"id": "mine", "text": "12", "data": {"shape": "alone", "position": 0}}
        asking = asyncio.create_task(client.post("/queries", json=[mine]))
        reading = asyncio.create_task(events_of(client))
        continued = asyncio.create_task(events_of(client, **{"last-event-id": "2"}))
        verdicts = await judge(client)
        events = await reading
        assert await continued == events[2:], "after the second step"
        (answered,) = (await asking).json()
        assert answered["query"] == "mine" and len(answered["rewards"]["solver"]) == 4
        assert [data["submitted_queries"] for _, data in events[:3]].count(1) == 1
    assert run.wait() == 0
    assert [head for head, _ in events] == ["id: 1", "id: 2", "id: 3", "event: end"]
    assert [data for _, data in events[:3]] == run.metrics and events[3][1] == {"error": None}
    assert len(verdicts) == 3 * 8
    run.assert_logs_are_clean()


async def test_a_browser_that_leaves_is_forgotten_and_the_error_of_a_run_is_its_last_event(
    launcher: Launcher,
) -> None:
    hold = launcher.runs / "hold"
    hold.write_text("2")
    run = launcher.train("failing", *SIMULATED, f"data.hold={hold}")
    await asyncio.to_thread(run.wait_for_step, 1)
    async with served(run) as client:
        async with client.stream("GET", "/steps", params={"after": 0}) as response:
            assert await anext(aiter(response.aiter_lines())) == "id: 1"
        reading = asyncio.create_task(events_of(client))
        assert (await client.get("/status")).json()["step"] == 1
        run.actors()["store"].kill()
        events = await reading
        assert events[-1][0] == "event: end" and "actor store died" in events[-1][1]["error"]
        assert await asyncio.to_thread(run.wait) == 1
        assert (await client.get("/status")).status_code == 503
    hold.unlink()
