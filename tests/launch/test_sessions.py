"""Sessions that services outside the run open at its gateway: played by any client, rewarded later, trained once or
counted."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import flexmarl

from ..patience import PATIENCE_S
from .conftest import SIMULATED, json_lines
from .in_process import run_in_loop, wait_for_step

SERVED = (
    *SIMULATED,
    "agents.solver.algorithm.name=reinforce_pp",
    "training.steps=100000",
    "checkpoint.every=100000",
    "gateway.listen=0",
)
ASYNC = (*SERVED, "mode=async", "max_staleness=2", "agents.solver.algorithm.correction=decoupled")
"""Drawn queries after the first steps hold their steps, until ``held`` is over: no policy steps meanwhile."""


@pytest.fixture(autouse=True)
async def _deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in json_lines(run / "events.jsonl") if line["event"] == kind]


def trained(run: Path) -> Counter[str]:
    """Counts how often each sample was trained, by the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step_*[0-9]"))
    state = json.loads((newest / "solver" / "simulated_policy.json").read_text())
    return Counter(name for names in state["trained"].values() for name in names)


@asynccontextmanager
async def service_of(run: flexmarl.Run) -> AsyncIterator[httpx2.AsyncClient]:
    """A client with the key of services."""
    folder = run.directory.path
    while not (listening := events(folder, "gateway_listens")):
        await asyncio.sleep(0.02)
    key = Path(listening[0]["key_file"]).read_text()
    headers = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(
        base_url=listening[0]["url"], headers=headers, timeout=PATIENCE_S
    ) as client:
        yield client


async def opened(service: httpx2.AsyncClient, **asked: Any) -> dict[str, Any]:
    response = await service.post("/sessions", json=asked)
    assert response.status_code == 201, response.text
    body: dict[str, Any] = response.json()
    return body


async def talk(session: dict[str, Any], turns: int = 2, model: str = "solver") -> list[dict[str, Any]]:
    """A conversation of a program. Returns the answers."""
    answers, messages = [], [{"role": "user", "content": "12="}]
    headers = {"authorization": f"Bearer {session['key']}"}
    async with httpx2.AsyncClient(base_url=session["url"], headers=headers, timeout=PATIENCE_S) as client:
        for _ in range(turns):
            response = await client.post("/v1/chat/completions", json={"model": model, "messages": messages})
            assert response.status_code == 200, response.text
            answers.append(response.json())
            messages += [answers[-1]["choices"][0]["message"], {"role": "user", "content": "more"}]
    return answers


@asynccontextmanager
async def held_run(tmp_path: Path, *settings: str) -> AsyncIterator[tuple[flexmarl.Run, Path]]:
    """A run whose steps from the third on wait until the file is gone; it is stopped at the end."""
    hold = tmp_path / "hold"
    hold.write_text("4")
    async with run_in_loop(tmp_path, "run", *settings, f"data.hold={hold}") as run:
        await wait_for_step(run, 2)
        yield run, hold
        hold.unlink(missing_ok=True)
        await wait_for_step(run, len(json_lines(run.directory.metrics)) + 2)
        await run.stop()


async def test_a_session_is_played_rewarded_and_trained(tmp_path: Path) -> None:
    async with held_run(tmp_path, *ASYNC) as (run, _), service_of(run) as service:
        session = await opened(service, models={"gpt": "solver"}, metadata={"user": 7})
        await talk(session, model="gpt")
        ended = await service.post(f"/sessions/{session['id']}/rewards", json={"agents": {"solver": 0.5}})
        assert (ended.status_code, ended.json()["state"]) == (200, "rewarded"), ended.text
    names = [name for name in trained(tmp_path / "run").elements() if session["id"] in name]
    assert len(names) == 2 == len(set(names))
