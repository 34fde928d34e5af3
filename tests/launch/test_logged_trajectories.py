"""Trajectories of a log: each is trained once or dropped with its reason, in every mode and through losses."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import flexmarl
from flexmarl.actors.errors import QueriesRefused
from flexmarl.core.errors import ActorDead, CallTimeout
from flexmarl.launch.cli.main import main
from flexmarl.launch.errors import RunUnreachable

from ..patience import PATIENCE_S
from .conftest import SIMULATED, Launcher, json_lines
from .in_process import run_in_loop, wait_for_step
from .run_files import trained

ENDLESS = (*SIMULATED, "training.steps=100000", "checkpoint.every=100000")
ASYNC = (*ENDLESS, "mode=async", "max_staleness=2", "agents.solver.algorithm.correction=decoupled")


@pytest.fixture(autouse=True)
async def _deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


def line(query: str, reward: float, **keys: Any) -> dict[str, Any]:
    """An answer of two tokens and the end."""
    logged = {"query": query, "agent": "solver", "prompt": "12=", "answer": "ab", "reward": reward}
    return logged | {"logprobs": [-0.5, -1.0, -0.25]} | keys


def log(count: int, **keys: Any) -> list[dict[str, Any]]:
    """Groups of two answers."""
    return [line(f"log-{n // 2}", float(n % 2), **keys) for n in range(2 * count)]


def logged(run: Path) -> Counter[str]:
    """The number of times that each logged trajectory was trained: ``QUERY_NUMBER``."""
    names = (name.partition(":")[2] for name in trained(run).elements())
    return Counter(name.replace("_0_", "_") for name in names if name.startswith("log-"))


def each_once(count: int) -> dict[str, int]:
    return {f"log-{n // 2}_{n % 2}": 1 for n in range(2 * count)}


@pytest.mark.parametrize("mode", ["strict", "sync", "async"])
async def test_answers_of_another_policy_are_trained_once_with_their_log_probs(
    tmp_path: Path, mode: str
) -> None:
    settings = ASYNC if mode == "async" else (*ENDLESS, f"mode={mode}")
    async with (
        run_in_loop(tmp_path, mode, *settings) as run,
        flexmarl.connect(run.directory.path, wait_s=PATIENCE_S) as program,
    ):
        answers = await program.submit_logged(log(3))
        assert [answer.query for answer in answers] == ["log-0", "log-1", "log-2"]
        assert not any(answer.dropped for answer in answers)
        assert [answer.rewards for answer in answers] == [{"solver": [0.0, 1.0]}] * 3
        steps = {answer.step for answer in answers}
        assert len(steps) == 3, "a step of two queries leaves one to the run's own"
        again = await program.submit_logged(log(3))
        assert [answer.step for answer in again] == [answer.step for answer in answers], (
            "no name is trained twice"
        )
        await wait_for_step(run, max(steps))
        rows = await program.samples("query = 'log-1'")
        assert sorted(row["reward"] for row in rows) == [0.0, 1.0]
        assert sum(row["advantage"] for row in rows) == pytest.approx(0.0)
        await run.stop()
    assert logged(run.directory.path) == each_once(3)
    lines = json_lines(run.directory.metrics)
    assert sum(step["logged_trajectories"] for step in lines) == 6
    assert {step["turns/solver"] for step in lines} <= {4, 8}, "figures of generation are the run's own"


async def test_answers_of_a_version_of_the_run_are_trained_or_too_old(tmp_path: Path) -> None:
    async with (
        run_in_loop(tmp_path, "versions", *ASYNC, "engine.token_s=0.1") as run,
        flexmarl.connect(run.directory.path, wait_s=PATIENCE_S) as program,
    ):
        await wait_for_step(run, 6)
        old = await program.submit_logged([line("log-old", reward, version=1) for reward in (0.0, 1.0)])
        assert "older than max_staleness" in old[0].dropped
        with pytest.raises(
            QueriesRefused, match=r"log-new: agent solver has version 100000000, and the newest"
        ):
            await program.submit_logged([line("log-new", n, version=100_000_000) for n in (0.0, 1.0)])
        while True:
            newest = json_lines(run.directory.metrics)[-1]["versions"]["solver"]
            lines = [line(f"log-{newest}", n, version=newest) for n in (0.0, 1.0)]
            for one in lines:
                del one["logprobs"]
            (answer,) = await program.submit_logged(lines)
            if not answer.dropped:  # else steps have passed meanwhile
                break
        (row, _) = await program.samples(f"query = 'log-{newest}'")
        assert row["policy_version"] == newest
        await run.stop()
    counts = logged(run.directory.path)
    assert counts == {f"log-{newest}_0": 1, f"log-{newest}_1": 1}
    late = [event for event in json_lines(run.directory.events) if event["event"] == "group_late"]
    assert late[0]["query"] == "log-old" and late[0]["trajectories"] == 2
    assert json_lines(run.directory.metrics)[late[0]["step"] - 1]["late_trajectories"] >= 2


async def test_groups_that_no_step_takes_are_answered_so(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("2")
    async with (
        run_in_loop(tmp_path, "ended", *ENDLESS, f"data.hold={hold}") as run,
        flexmarl.connect(run.directory.path, wait_s=PATIENCE_S) as program,
    ):
        try:
            await wait_for_step(run, 1)
            submitting = asyncio.create_task(program.submit_logged(log(4)))
            await program.status()
            await program.stop()
            try:
                reasons = Counter(answer.dropped for answer in await submitting)
            except QueriesRefused as refusal:  # a busy machine reads the lines more slowly than it stops
                reasons = Counter([str(refusal)])
            assert reasons.pop("", 0) <= 1, "the step under way may have taken one"
            assert {*reasons} == {"no further step begins: the run is being stopped"}
            with pytest.raises(QueriesRefused, match="no further step begins"):
                await program.submit_logged(log(2))
        finally:
            hold.unlink()
        await run.wait()


async def test_each_is_trained_once_through_kills_of_worker_and_store(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed worker is begun again by itself. A killed store has the run continue from a checkpoint, which knows
    those that are trained: the program submits the same file again."""
    count, file = 12, tmp_path / "log.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in log(count)))
    run = launcher.train("struck", *ENDLESS, "checkpoint.every=2", "--restarts", "1")
    async with flexmarl.connect(run.directory, wait_s=PATIENCE_S) as program:
        await asyncio.to_thread(run.wait_for_step, 1)
        submitting = asyncio.create_task(program.submit_logged(log(count)))
        while not await program.samples("query = 'log-1'"):
            await asyncio.sleep(0.02)
        run.actors()["rollout-0"].kill()
        while not await program.samples("query = 'log-5'"):
            await asyncio.sleep(0.02)
        run.actors()["store"].kill()
        with suppress(QueriesRefused, ActorDead, CallTimeout):
            await submitting
    await asyncio.to_thread(run.wait_for_output, "continuing after step")
    while await asyncio.to_thread(main, ["submit", str(run.directory), str(file), "--json"]) != 0:
        await asyncio.sleep(0.1)  # it is still starting
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["trained"].keys() == {f"log-{n}" for n in range(count)} and not shown["dropped"]
    async with flexmarl.connect(run.directory, wait_s=PATIENCE_S) as program:
        await program.stop()
        with suppress(ActorDead, RunUnreachable):
            await program.wait()
    assert await asyncio.to_thread(run.wait) == 130, run.text
    assert logged(run.directory) == each_once(count)
