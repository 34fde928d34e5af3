"""``flexmarl.connect``: runs with simulated policies, reached from another program over their sockets and over TCP."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flexmarl
from flexmarl.actors.errors import QueriesRefused, StoreError
from flexmarl.actors.messages import Query
from flexmarl.actors.run_events import RunEnded, RunStarted
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.core.errors import ActorDead, ActorFailed, CallNotAllowed, UnsafeKeys
from flexmarl.core.protocol.session import Settings
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.launch.cli.main import main
from flexmarl.launch.errors import RunDirectoryError, RunFailed, RunUnreachable
from flexmarl.launch.run import connected_run
from flexmarl.launch.run.connected_run import ConnectedRun
from flexmarl.launch.run.run_address import RunAddress
from flexmarl.launch.run_folder.json_lines import metrics_from_json

from ...patience import PATIENCE_S
from ..conftest import SIMULATED, Launched, Launcher, json_lines
from ..in_process import end_of, run_in_loop, wait_for_step

ENDLESS = (*SIMULATED, "training.steps=100000")
JUDGED = (
    "agents.solver.columns.judged={type: float, required: true, written_by: external,"
    f" timeout_s: {PATIENCE_S}}}"
)


@pytest.fixture(autouse=True)
async def _deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


async def waited(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


@asynccontextmanager
async def held(
    runs: Path, step: int, *settings: str, name: str = "held"
) -> AsyncIterator[tuple[flexmarl.Run, Path]]:
    """A run in this loop, whose step ``step`` waits until the file is removed."""
    hold = runs / "hold"
    hold.write_text(str(2 * (step - 1)))  # queries_per_step
    async with run_in_loop(runs, name, *SIMULATED, f"data.hold={hold}", *settings) as run:
        await wait_for_step(run, step - 1)
        yield run, hold


async def test_steps_and_events_are_those_of_the_files_and_end_with_the_run(tmp_path: Path) -> None:
    async with (
        held(tmp_path, 3, "training.steps=4") as (run, hold),
        flexmarl.connect(run.directory.path) as followed,
    ):
        assert (await followed.status()).step == 2
        all_steps, events = followed.steps(after=0), followed.events(after=0)
        first = [await anext(all_steps), await anext(all_steps)]
        end = asyncio.create_task(followed.wait())
        later = asyncio.create_task(_next(followed.steps()))
        third = asyncio.create_task(_list(followed.steps(after=2)))
        reading = asyncio.create_task(_list(events))
        await followed.status()  # the followers have asked by now: calls are served in order
        assert not later.done() and not end.done() and not third.done()
        hold.unlink()
        steps = [*first, *await _list(all_steps)]
        assert await later == steps[2] and await third == steps[2:]
        seen = await reading
        assert await end == seen[-1]
        assert (await run.wait()).last_step == 4
    lines, events_written = json_lines(run.directory.metrics), json_lines(run.directory.events)
    assert steps == [metrics_from_json(line) for line in lines] and len(steps) == 4
    assert isinstance(seen[0], RunStarted) and isinstance(seen[-1], RunEnded) and seen[-1].step == 4
    assert [event.event for event in seen] == [line["event"] for line in events_written]
    assert seen[-1].checkpoint == events_written[-1]["checkpoint"]


async def _next(items: AsyncIterator[StepMetrics]) -> StepMetrics:
    return await anext(items)


async def _list(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_a_follower_that_reads_nothing_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps than its window holds; it reads the first ones, and then the run is over."""
    small = partial(ActorSystem, settings=Settings(stream_window=8))
    monkeypatch.setattr(connected_run, "ActorSystem", small)
    async with run_in_loop(tmp_path, "unread", *SIMULATED, "training.steps=40") as run:
        await wait_for_step(run, 1)
        async with flexmarl.connect(run.directory.path) as followed:
            slow = followed.steps(after=0)
            read = [await anext(slow)]
            assert (await run.wait()).last_step == 40
            with pytest.raises(ActorDead):
                async for step in slow:
                    read.append(step)  # noqa: PERF401  # those before the error count
    lines = json_lines(run.directory.metrics)
    assert len(lines) == 40
    assert 1 <= len(read) < 40 and read == [metrics_from_json(line) for line in lines[: len(read)]]


async def test_the_error_of_a_run_is_raised_at_the_end(tmp_path: Path) -> None:
    async with held(tmp_path, 2) as (run, hold), flexmarl.connect(run.directory.path) as followed:
        events, steps = followed.events(after=0), followed.steps()
        waiting = asyncio.create_task(followed.wait())
        assert isinstance(await anext(events), RunStarted)
        reading = asyncio.create_task(_list(steps))
        await followed.status()
        end_of("store")
        with pytest.raises(RunFailed, match="actor store died"):
            async for event in events:
                last = event
        assert isinstance(last, RunEnded) and "actor store died" in (last.error or "")
        for task in (waiting, reading):
            with pytest.raises(RunFailed, match="actor store died"):
                await task
        hold.unlink()
        with pytest.raises((ActorDead, ActorFailed), match="actor store died"):
            await run.wait()
    assert json_lines(run.directory.events)[-1]["error"] == last.error


async def test_a_killed_launcher_is_noticed(launcher: Launcher) -> None:
    run = launcher.train("killed", *ENDLESS)
    await asyncio.to_thread(run.wait_for_step, 1)
    async with flexmarl.connect(run.directory) as followed:
        await anext(followed.steps())
        waiting = asyncio.create_task(followed.wait())
        await followed.status()
        run.process.kill()
        with pytest.raises(ActorDead):
            await waiting
    run.wait()
    with pytest.raises(RunUnreachable, match="killed is not running"):
        await flexmarl.connect(run.directory).__aenter__()
    with pytest.raises(RunUnreachable, match="does not answer: has it ended?"):
        await flexmarl.connect(run.directory / "address").__aenter__()


async def test_stop_ends_it_after_the_steps_under_way(launcher: Launcher) -> None:
    run = launcher.train("stopped", *ENDLESS)
    await asyncio.to_thread(run.wait_for_step, 1)
    async with flexmarl.connect(str(run.directory)) as followed:
        waiting = asyncio.create_task(followed.wait())
        await followed.status()
        assert await followed.stop() is True
        end = await waiting
        assert end.stopped and end.checkpoint is not None and Path(end.checkpoint).exists()
    assert run.wait() == 130
    run.assert_logs_are_clean()


async def test_a_judge_sees_the_samples_and_writes_its_column(tmp_path: Path) -> None:
    judged: set[str] = set()

    async def judge(connected: ConnectedRun) -> None:
        while True:
            waiting = await connected.samples("agent = 'solver' and status = 'writing'")
            names = [row["sample_id"] for row in waiting]
            tokens = await connected.column("solver", "tokens", names)
            assert len(tokens) == len(names) and all(len(array) for array in tokens)
            await connected.write(
                "solver", {"sample_id": names, "judged": [row["reward"] for row in waiting]}
            )
            judged.update(names)

    async with run_in_loop(tmp_path, "judged", *SIMULATED, "training.steps=3", JUDGED) as run:
        await waited((run.directory.path / "address").exists)
        async with flexmarl.connect(run.directory.path) as connected:
            ended = asyncio.create_task(connected.wait())
            judging = asyncio.create_task(judge(connected))
            with pytest.raises(StoreError, match="there is no sample 'none'"):
                await connected.write("solver", {"sample_id": ["none"], "judged": [1.0]})
            with pytest.raises(StoreError, match="there is no column rewrd"):
                await connected.samples("rewrd > 1")
            assert (await ended).step == 3
            with pytest.raises(ActorDead):
                await judging
        assert (await run.wait()).last_step == 3
    assert len(judged) == 3 * 8


@pytest.fixture(scope="module")
def run(launcher: Launcher) -> Launched:
    run = launcher.train("tcp", *ENDLESS, "network.listen=127.0.0.1")
    run.wait_for_step(2)
    return run


class TestOverTcp:
    async def test_a_copy_of_the_address_file_is_enough(self, run: Launched, tmp_path: Path) -> None:
        copy = tmp_path / "copied"
        shutil.copy(run.directory / "address", copy)
        found = RunAddress.load(copy)
        for way in (flexmarl.connect(copy), flexmarl.connect(found.address, found.keys)):
            async with way as connected:
                assert (await connected.status()).step >= 2
                assert "{" in await connected.log("store") or await connected.log("store") == ""
                with pytest.raises(
                    RunDirectoryError, match="has no log of '../config'; there are: fork-server, launcher, "
                ):
                    await connected.log("../config")
        copy.chmod(0o644)
        with pytest.raises(UnsafeKeys, match="open to other users"):
            await flexmarl.connect(copy).__aenter__()

    async def test_the_commands_take_an_address_file(
        self, run: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        copy = str(tmp_path / "copied")
        shutil.copy(run.directory / "address", copy)
        assert await asyncio.to_thread(main, ["status", copy]) == 0
        assert "policies   solver x1" in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["logs", copy, "launcher"]) == 0
        shown = capsys.readouterr().out
        log = (run.directory / "logs" / "launcher.log").read_text()
        assert shown and log.startswith(shown), "the run may have written more meanwhile"
        assert await asyncio.to_thread(main, ["logs", copy, "nothing"]) == 2
        assert "has no log of 'nothing'" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["status", str(tmp_path / "none")]) == 2
        assert "none is not a run directory" in capsys.readouterr().err

    async def test_submitted_queries_are_trained_and_answered_with_their_rewards(
        self, run: Launched, tmp_path: Path
    ) -> None:
        service = tmp_path / "service"
        async with flexmarl.connect(run.directory) as owner:
            await owner.admit(service, ["submit"])
        async with flexmarl.connect(service) as connected:
            queries = [Query(f"chat-{n}", "12", {"shape": "alone", "position": n}) for n in range(3)]
            answers = await connected.submit(queries)
            with pytest.raises(CallNotAllowed):
                await connected.stop()
        assert [answer.query for answer in answers] == ["chat-0", "chat-1", "chat-2"]
        assert all(
            [len(rewards) for rewards in answer.rewards.values()] == [4] and not answer.dropped
            for answer in answers
        )
        turns = [turn for answer in answers for one in answer.trajectories for turn in one.turns]
        assert {turn.sample_id.split(":")[1].split("_")[0] for turn in turns} == {
            "chat-0",
            "chat-1",
            "chat-2",
        }
        assert all(turn.reward is not None for turn in turns)
        last = max(answer.step for answer in answers)
        await asyncio.to_thread(run.wait_for_step, last)
        assert sum(line["submitted_queries"] for line in run.metrics) == 3
        assert last - min(answer.step for answer in answers) == 1, "a step has two queries"

    async def test_half_of_a_character_is_refused_before_it_is_sent(self, run: Launched) -> None:
        async with flexmarl.connect(run.directory) as connected:
            with pytest.raises(QueriesRefused) as refused:
                await connected.submit([Query("a", "12"), Query("b", "12", {"note": "\ud83d"})])
            with pytest.raises(StoreError, match=r"half of a surrogate pair"):
                await connected.write("solver", {"sample_id": ["1:q_0_0"], "note": ["\ud83d"]})
        assert str(refused.value).startswith(
            r"queries[1] is the query 'b', which can't be sent to another process: data.note is '\ud83d': half of"
        )

    async def test_an_admitted_program_may_do_no_more_than_its_rights(
        self, run: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        watcher, judge = tmp_path / "watcher", tmp_path / "judge"
        assert await asyncio.to_thread(main, ["admit", str(run.directory), str(watcher)]) == 0
        assert f"{watcher}: its holder may watch {run.directory}" in capsys.readouterr().out
        async with flexmarl.connect(run.directory) as owner:
            await owner.admit(judge, ["judge"])
        assert watcher.stat().st_mode & 0o777 == 0o600
        keys = RunAddress.load(watcher).keys
        assert keys is not None and keys.server_secret is None
        async with flexmarl.connect(watcher) as watching, flexmarl.connect(judge) as judging:
            assert (await anext(watching.steps())).step > 2
            for refused in (
                watching.stop(),
                watching.samples(),
                watching.admit(tmp_path / "more", ["stop"]),
                judging.stop(now=True),
                judging._system.ref("store", (await judging._control.api.store()).address).ask(
                    "retire", "rollout-0"
                ),
            ):
                with pytest.raises(CallNotAllowed):
                    await refused
            assert (await judging.samples("status = 'consumed'", 3))[0]["agent"] == "solver"
        assert not (tmp_path / "more").exists()

    async def test_a_stranger_is_refused(self, run: Launched) -> None:
        found = RunAddress.load(run.directory / "address")
        assert found.keys is not None
        for keys in (Keys.for_client(found.keys.server_public), Keys.make()):
            with pytest.raises(RunUnreachable, match="does not answer"):
                await flexmarl.connect(found.address, keys).__aenter__()


def chat(**asked: object) -> Query:
    return Query("chat", "12", {"shape": "alone", "position": 0, **asked})


async def test_failures_of_submitted_queries_end_no_run_and_none_waits_for_a_step_that_does_not_come(
    tmp_path: Path,
) -> None:
    async with (
        held(tmp_path, 4, "training.steps=4", "rollout.max_failed_share=0.0") as (run, hold),
        flexmarl.connect(run.directory.path) as connected,
    ):
        with pytest.raises(QueriesRefused, match="no further step begins: step 4, the run's last, has begun"):
            await connected.submit([chat()])
        hold.unlink()
        await run.wait()
    async with held(tmp_path, 3, "training.steps=4", "rollout.max_failed_share=0.0", name="failing") as (
        run,
        hold,
    ):
        async with flexmarl.connect(run.directory.path) as connected:
            submitting = asyncio.create_task(connected.submit([chat(faults=["raise"], faulty=100)]))
            await connected.status()
            hold.unlink()
            (answer,) = await submitting
        assert answer.failures == 4 and (await run.wait()).last_step == 4
    lines = json_lines(run.directory.metrics)
    assert sum(line["failed_submitted_trajectories"] for line in lines) == 4
    assert not any(line["failed_trajectories"] for line in lines)


async def test_queries_that_a_stop_or_a_loss_leaves_are_refused_and_submitted_again_to_the_resumed_run(
    tmp_path: Path, launcher: Launcher
) -> None:
    hold, own = tmp_path / "hold", tmp_path / "own"
    hold.write_text("4")  # steps of two queries: the third waits
    own.write_text("0")
    first = launcher.train("resubmitted", *ENDLESS, f"data.hold={hold}")
    await asyncio.to_thread(first.wait_for_step, 2)
    async with flexmarl.connect(first.directory) as connected:
        waiting = asyncio.create_task(connected.submit([chat()]))
        await connected.status()
        await connected.stop()
        with pytest.raises(QueriesRefused, match="no further step begins: the run is being stopped"):
            await waiting
    hold.unlink()
    assert await asyncio.to_thread(first.wait) == 130, "stopped, with a checkpoint"
    before = len(first.metrics)

    second = launcher.resume("resubmitted")
    await asyncio.to_thread(second.wait_for_step, before + 1)
    async with flexmarl.connect(second.directory) as connected:
        (answer,) = await connected.submit([chat()])
        assert answer.step > before and [len(rewards) for rewards in answer.rewards.values()] == [4]
        begun = asyncio.create_task(connected.submit([chat(hold=str(own))]))
        await connected.status()  # it is there by now, or in a step that it holds
        second.actors()["orchestrator"].kill()
        with pytest.raises((QueriesRefused, ActorDead)):
            await begun
    assert await asyncio.to_thread(second.wait) == 1

    third = launcher.resume("resubmitted")
    own.unlink()
    await asyncio.to_thread(third.wait_for_step, len(second.metrics) + 1)
    async with flexmarl.connect(third.directory) as connected:
        (answer,) = await connected.submit([chat(hold=str(own))])
        assert answer.query == "chat" and not answer.failures


async def test_a_run_without_tcp_admits_no_one_from_outside(tmp_path: Path) -> None:
    async with run_in_loop(tmp_path, "local", *ENDLESS) as run:
        await wait_for_step(run, 1)
        async with flexmarl.connect(run.directory.path) as owner:
            with pytest.raises(RunUnreachable, match="Start it with network.listen=ADDRESS"):
                await owner.admit(tmp_path / "file", ["watch"])
    assert not (tmp_path / "file").exists()
