"""Sessions that services outside the run open at its gateway: played by any client, rewarded later, trained once or
counted."""

import asyncio
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
from .in_process import end_of, run_in_loop, wait_for_step
from .run_files import events, trained

SERVED = (
    *SIMULATED,
    "agents.solver.algorithm.name=reinforce_pp",
    "training.steps=100000",
    "checkpoint.every=100000",
    "gateway.listen=0",
)
ASYNC = (*SERVED, "mode=async", "max_staleness=2", "agents.solver.algorithm.correction=decoupled")
"""Drawn queries after the first steps hold their steps, until ``held`` is over: no policy steps meanwhile."""


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


async def settled(
    service: httpx2.AsyncClient, session: dict[str, Any], rewards: dict[str, Any] | None
) -> dict[str, Any]:
    """Ends a session with rewards, or without any, and returns its state once its fate is known."""
    place = f"/sessions/{session['id']}"
    if rewards is None:
        response = await service.delete(place)
    else:
        response = await service.post(f"{place}/rewards", json=rewards)
    assert response.status_code in (200, 202), response.text
    return await state_after(service, session, "ending")


async def state_after(service: httpx2.AsyncClient, session: dict[str, Any], *before: str) -> dict[str, Any]:
    """Waits until the session has another state than those of ``before``, and returns it."""
    async with asyncio.timeout(PATIENCE_S):
        while (state := (await service.get(f"/sessions/{session['id']}")).json())["state"] in before:
            await asyncio.sleep(0.02)
    answer: dict[str, Any] = state
    return answer


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
        ended = await settled(service, session, {"agents": {"solver": 0.5}})
        assert ended["state"] == "rewarded", ended
    names = [name for name in trained(tmp_path / "run").elements() if session["id"] in name]
    assert len(names) == 2 == len(set(names))


async def refusal(response: httpx2.Response, status: int) -> str:
    """The message of a refused request."""
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


async def test_each_of_many_sessions_is_trained_once_or_counted(tmp_path: Path) -> None:
    async with held_run(tmp_path, *ASYNC) as (run, _), service_of(run) as service:
        sessions = await asyncio.gather(*(opened(service) for _ in range(16)))
        brief = await asyncio.gather(*(opened(service, lives_s=0.3) for _ in range(4)))
        await asyncio.gather(
            *(talk(session, turns=1 + number % 3) for number, session in enumerate(sessions))
        )
        for session in sessions[:12]:
            rewards = {"turns": [{"turn": 0, "reward": 0.25}], "team": 1.0, "metrics": {"stars": 4.0}}
            assert (await settled(service, session, rewards))["state"] == "rewarded"
        for session in sessions[12:]:
            assert (await settled(service, session, None))["state"] == "closed"
        for session in brief:
            state = await state_after(service, session, "open")
            assert (state["state"], state["reason"]) == ("expired", "no rewards within 0.3 s")
        again = await service.post(f"/sessions/{brief[0]['id']}/rewards", json={"agents": {"solver": 1.0}})
        assert "has ended, expired" in await refusal(again, 410)
    counts = trained(tmp_path / "run")
    assert set(counts.values()) == {1}
    expected = {session["id"]: 1 + number % 3 for number, session in enumerate(sessions[:12])}
    of_sessions = Counter(name.partition(":")[2].rsplit("_", 2)[0] for name in counts)
    assert {name: of_sessions[name] for name in expected} == expected
    assert not any(of_sessions[session["id"]] for session in (*sessions[12:], *brief))
    lines = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("expired_sessions", 0) for line in lines) == 4
    assert sum(line.get("closed_sessions", 0) for line in lines) == 4
    assert sum(line["failed_trajectories"] + line["failed_submitted_trajectories"] for line in lines) == 0
    assert {line["sample"] for line in events(tmp_path / "run", "rewards_late")} == {brief[0]["id"]}


async def test_wrong_keys_and_bodies_are_refused_with_the_reason_and_end_nothing(tmp_path: Path) -> None:
    async with held_run(tmp_path, *ASYNC) as (run, _), service_of(run) as service:
        session, other = await opened(service), await opened(service)
        place = f"/sessions/{session['id']}"
        of_program = {"authorization": f"Bearer {session['key']}"}
        call = {"model": "solver", "messages": [{"role": "user", "content": "1="}]}
        chat = "/v1/chat/completions"
        refused = [
            (await service.post("/sessions", json={}, headers=of_program), 401, "gateway.key_file"),
            (
                await service.post(f"{place}/rewards", json={"team": 1}, headers=of_program),
                401,
                "gateway.key_file",
            ),
            (await service.post(place + chat, json=call), 401, "not the one of session"),
            (
                await service.post(f"/sessions/{other['id']}{chat}", json=call, headers=of_program),
                401,
                "not the one",
            ),
            (
                await service.post("/sessions/none" + chat, json=call, headers=of_program),
                404,
                "there is no session",
            ),
            (await service.post("/sessions", json={"models": {"gpt": "nobody"}}), 422, "there is: solver"),
            (await service.post("/sessions", json={"lives_s": 1e9}), 422, "gateway.session_s=3600"),
            (await service.post("/sessions", json={"metadata": 3}), 422, "metadata"),
            (await service.post("/sessions", content=b"["), 422, "JSON"),
            (await service.post(f"{place}/rewards", json={"team": 1.0}), 422, "no turn that has ended"),
            (await service.post(f"{place}/rewards", json={}), 422, "no rewards"),
        ]
        for response, status, words in refused:
            assert words in await refusal(response, status)
        (answer,) = await talk(session, turns=1)
        for rewards, words in (
            ({"agents": {"nobody": 1.0}}, "nobody"),
            ({"metrics": {"stars": 1.0}, "turns": [{"turn": 7, "reward": 1.0}]}, "turn 7"),
            ({"agents": {"solver": "much"}}, "agents.solver"),
        ):
            assert words in await refusal(await service.post(f"{place}/rewards", json=rewards), 422)
        named = {"turns": [{"turn": answer["id"], "reward": 1.0}]}
        assert (await settled(service, session, named))["state"] == "rewarded"
        response = await service.post(place + chat, json=call, headers=of_program)
        assert "rewarded" in await refusal(response, 410)
        keys = Path(run.directory.path / "gateway.key")
        assert keys.stat().st_mode & 0o077 == 0
        secrets = keys.read_bytes(), session["key"].encode()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path != keys]
    assert files and not [path for path in files for key in secrets if key in path.read_bytes()]


async def test_a_session_whose_worker_is_lost_ends_and_says_so(tmp_path: Path) -> None:
    async with held_run(tmp_path, *ASYNC) as (run, _), service_of(run) as service:
        session = await opened(service)
        await talk(session, turns=1)
        end_of("rollout-0")
        rewards = {"agents": {"solver": 1.0}}
        state = await state_after(service, session, "open")
        assert (state["state"], state["reason"]) == ("lost", "its rollout worker was lost")
        response = await service.post(f"/sessions/{session['id']}/rewards", json=rewards)
        assert "its rollout worker was lost" in await refusal(response, 410)
        after = await opened(service)
        await talk(after)
        assert (await settled(service, after, rewards))["state"] == "rewarded"
    counts = trained(tmp_path / "run")
    assert set(counts.values()) == {1} and not any(session["id"] in name for name in counts)
    lines = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("lost_sessions", 0) for line in lines) == 1
    assert [line["sample"] for line in events(tmp_path / "run", "rewards_late")] == [session["id"]]


async def test_a_lost_worker_may_have_a_session_of_a_step_that_has_ended(tmp_path: Path) -> None:
    async with held_run(tmp_path, *ASYNC) as (run, hold), service_of(run) as service:
        session = await opened(service)
        hold.unlink()
        await wait_for_step(run, 8)
        end_of("rollout-0")
        while (state := (await service.get(f"/sessions/{session['id']}")).json())["state"] == "open":
            await asyncio.sleep(0.02)
        assert (state["state"], state["reason"]) == ("lost", "its rollout worker was lost")
    lines = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("lost_sessions", 0) for line in lines) == 1
    assert sum(line.get("restarted_groups", 0) for line in lines) >= 1


async def test_under_strict_a_session_begins_with_the_next_step_and_holds_it(tmp_path: Path) -> None:
    async with (
        held_run(tmp_path, *SERVED, "gateway.open_timeout_s=0.5") as (run, hold),
        service_of(run) as service,
    ):
        assert "no rollout worker has begun it" in await refusal(
            await service.post("/sessions", json={}), 503
        )
        hold.unlink()
        while (response := await service.post("/sessions", json={})).status_code == 503:
            assert response.headers["retry-after"] == "1"
        session = response.json()
        step = len(json_lines(run.directory.metrics))
        await talk(session, turns=3)
        assert len(json_lines(run.directory.metrics)) <= step + 1, "the session holds its step"
        assert (await settled(service, session, {"agents": {"solver": 1.0}}))["state"] == "rewarded"
    assert sum(session["id"] in name for name in trained(tmp_path / "run")) == 3
    with flexmarl.Samples(tmp_path / "run") as samples:
        (trajectory,) = [one for one in samples.trajectories() if one.query.id == session["id"]]
    assert len({turn.version for turn in trajectory.turns}) == 1


@pytest.mark.parametrize("mode", [ASYNC, SERVED])
async def test_a_run_that_stops_in_mid_session_waits_for_it_if_its_step_does(
    tmp_path: Path, mode: tuple[str, ...]
) -> None:
    async with run_in_loop(tmp_path, "run", *mode) as run, service_of(run) as service:
        await wait_for_step(run, 1)
        while (response := await service.post("/sessions", json={})).status_code == 503:
            pass  # strict: until a step begins
        session = response.json()
        await talk(session, turns=1)
        stopping = asyncio.create_task(run.stop())
        if mode is SERVED:
            await talk(session, turns=1)
            rewards = {"agents": {"solver": 1.0}}
            ended = await service.post(f"/sessions/{session['id']}/rewards", json=rewards)
            assert ended.json()["state"] in ("rewarded", "ending"), ended.text
        await stopping
    turns = sum(session["id"] in name for name in trained(tmp_path / "run"))
    assert turns == (2 if mode is SERVED else 0)


async def test_a_run_that_stops_waits_for_no_session_without_rewards(tmp_path: Path) -> None:
    settings = (*SERVED, "gateway.stop_s=0.1", f"supervision.stop_patience_s={PATIENCE_S}")
    async with run_in_loop(tmp_path, "run", *settings) as run, service_of(run) as service:
        await wait_for_step(run, 1)
        while (response := await service.post("/sessions", json={})).status_code == 503:
            pass  # until a step begins
        session = response.json()
        await talk(session, turns=1)
        await run.stop()
    lines = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("lost_sessions", 0) for line in lines) == 1
    assert not any(session["id"] in name for name in trained(tmp_path / "run"))
