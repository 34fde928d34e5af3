"""Actors that die or are removed: notices of deaths, files and processes that are left."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexmarl.core.errors import ActorDead, ActorFailed, ActorNotFound
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from ..echo import Echo
from ..span_batches import rows_of, timeless_recorder
from .workers import ECHO, eventually


async def test_what_an_actor_said_before_it_left_arrives_however_late_it_is_read(
    supervisor: Supervisor,
) -> None:
    await supervisor.spawn(ECHO, "echo", {})
    echo = supervisor.reference("echo", Echo)
    pid = (await supervisor.process_statistics())["echo"].pid
    last_words = asyncio.ensure_future(echo.api.leave("farewell"))
    for _ in range(3):  # it is sent
        await asyncio.sleep(0)
    while psutil.pid_exists(pid):
        time.sleep(0.01)  # noqa: ASYNC251  # blocks the loop until the process has ended
    assert await last_words == "farewell"


async def test_a_process_has_variables_of_its_own(supervisor: Supervisor) -> None:
    await supervisor.spawn(ECHO, "echo", {}, env={"FLAVOUR": "mint"})
    await supervisor.spawn(ECHO, "other", {})
    pids = {name: process.pid for name, process in (await supervisor.process_statistics()).items()}
    assert psutil.Process(pids["echo"]).environ()["FLAVOUR"] == "mint"
    assert "FLAVOUR" not in psutil.Process(pids["other"]).environ()


async def test_variables_can_only_be_added_to_an_environment_that_is_known(
    system: ActorSystem, private: Path, tmp_path: Path
) -> None:
    async with Supervisor(system, ProcessNode(system, private, tmp_path, None)) as inheriting:
        with pytest.raises(ValueError, match="has none to add variables to"):
            await inheriting.spawn(ECHO, "echo", {}, env={"FLAVOUR": "mint"})


@pytest.mark.usefixtures("patient_for_exit_reasons")
class TestDeath:
    @pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "signal 9"), (signal.SIGTERM, "signal 15")])
    async def test_a_kill_fails_the_calls_in_flight_at_once(
        self, supervisor: Supervisor, number: signal.Signals, how: str
    ) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        echo = supervisor.reference("echo", Echo)
        calls = [asyncio.ensure_future(echo.api.hang()) for _ in range(100)]
        pid = (await supervisor.process_statistics())["echo"].pid
        os.kill(pid, number)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(r, ActorDead) and how in str(r) and r.actor == "echo" for r in results)
        with pytest.raises(ActorDead):
            await supervisor.wait_failed()
        with pytest.raises(ActorDead):
            await echo.api.greet("late")

    async def test_an_exit_is_a_death_with_its_status(self, supervisor: Supervisor) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        with pytest.raises(ActorDead, match="exit status 3"):
            await supervisor.reference("echo", Echo).api.exit(3)

    async def test_failed_background_work_ends_the_actor_and_says_why(self, supervisor: Supervisor) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        await supervisor.reference("echo", Echo).api.crash_in_background()
        with pytest.raises(
            ActorFailed, match="actor echo failed: RuntimeError: background work failed"
        ) as caught:
            await supervisor.wait_failed()
        assert "in crash" in caught.value.remote_traceback

    @pytest.mark.parametrize(
        ("actor_class", "kwargs", "message"),
        [
            ("echo:RefusesToStart", {}, "ValueError: nothing to serve"),
            ("echo:RefusesWithoutWords", {}, "Wordless: .*no text"),
            (ECHO, {"greeting": ["no", "text"]}, "greeting: .*valid string"),
            (ECHO, {"volume": 3}, "volume: Unexpected keyword"),
            ("echo:Point", {}, "not a subclass of Actor"),
            ("nowhere:Echo", {}, "No module named 'nowhere'"),
        ],
    )
    async def test_an_actor_that_does_not_start_says_why(
        self, supervisor: Supervisor, actor_class: str, kwargs: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ActorFailed, match=message):
            await supervisor.spawn(actor_class, "echo", kwargs)

    async def test_the_first_failure_told_counts_though_another_process_ends_before(
        self, supervisor: Supervisor
    ) -> None:
        await asyncio.gather(supervisor.spawn(ECHO, "cause", {}), supervisor.spawn(ECHO, "consequence", {}))
        spans = timeless_recorder().take(1.0, 0)
        await supervisor.ref.ask(
            "failed", "cause", "cause", "ValueError", "it began here", "a traceback", spans
        )
        with pytest.raises(ActorDead, match="exit status 1"):
            await supervisor.reference("consequence", Echo).api.exit(1)
        with pytest.raises(ActorFailed, match="actor cause failed: ValueError: it began here"):
            await supervisor.wait_failed()

    async def test_the_spans_of_an_actor_that_has_failed_are_there_though_its_process_has_ended(
        self, supervisor: Supervisor
    ) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        echo = supervisor.reference("echo", Echo).api
        await echo.record("taken")
        taken = (await supervisor.process_spans(1.0, {}, PATIENCE_S))["echo"]
        await echo.record("last")
        await echo.crash_in_background()
        with pytest.raises(ActorFailed):
            await supervisor.wait_failed()
        last = (await supervisor.process_spans(1.0, {"echo": taken.number}, PATIENCE_S))["echo"]
        assert [[row.name for row in rows_of(batch)] for batch in (taken, last)] == [["taken"], ["last"]]
        assert "echo" not in await supervisor.process_spans(1.0, {"echo": last.number}, PATIENCE_S)

    async def test_a_death_shows_the_end_of_its_log_but_not_all_of_a_huge_one(
        self, supervisor: Supervisor, tmp_path: Path
    ) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        with (tmp_path / "echo.log").open("a") as log:
            log.write("x" * 10**6 + "\nlast words\n")
        with pytest.raises(ActorDead, match=r"echo\.log:\nx+\nlast words$") as caught:
            await supervisor.reference("echo", Echo).api.exit(3)
        assert len(str(caught.value)) < 2**16 + 1000

    async def test_a_death_is_noticed_though_its_log_is_gone(
        self, supervisor: Supervisor, tmp_path: Path
    ) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        (tmp_path / "echo.log").unlink()
        with pytest.raises(ActorDead, match="exit status 3\nIts log can't be read: .*echo.log"):
            await supervisor.reference("echo", Echo).api.exit(3)
        with pytest.raises(ActorDead):
            await asyncio.wait_for(supervisor.wait_failed(), PATIENCE_S)

    async def test_stopping_leaves_no_process_and_no_socket(
        self, system: ActorSystem, private: Path, tmp_path: Path
    ) -> None:
        environment = {
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[3] / "scripts" / "src"), str(Path(__file__).parents[1])]
            )
        }
        async with Supervisor(system, ProcessNode(system, private, tmp_path, environment)) as supervisor:
            await asyncio.gather(*(supervisor.spawn(ECHO, f"echo-{n}", {}) for n in range(3)))
            pids = [
                figures.pid
                for name, figures in (await supervisor.process_statistics()).items()
                if name != system.name
            ]
            os.kill(pids[0], signal.SIGSTOP)  # deaf to every request: only SIGKILL ends it
        assert len(pids) == 3 and not any(psutil.pid_exists(pid) for pid in pids)
        assert [path.name for path in private.iterdir() if "echo-0" not in path.name] == ["tests.sock"]

    @pytest.mark.parametrize("how", ["alone", "fork", "its actor is stopped", "its actor ends before"])
    async def test_orphans_end_and_nothing_is_left_when_their_parent_is_killed(
        self, tmp_path: Path, how: str
    ) -> None:
        maker = Path(__file__).parents[1] / "orphan_maker.py"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(maker), str(tmp_path), how),
            env={"PYTHONPATH": str(maker.parents[2] / "scripts" / "src")},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        line = await asyncio.wait_for(process.stderr.readline(), PATIENCE_S)
        pid, directory, fork = line.decode().split()
        child = psutil.Process(int(pid))
        if how == "its actor is stopped":
            child.suspend()
        elif how == "its actor ends before":
            process.send_signal(signal.SIGSTOP)  # it reads no report of the end
            child.kill()
            await asyncio.to_thread(child.wait, PATIENCE_S)
        process.kill()
        await process.wait()
        try:
            await asyncio.to_thread(child.wait, PATIENCE_S)
            await eventually(lambda: asyncio.to_thread(Path(directory).exists), lambda there: not there)
            if how == "fork":
                assert psutil.pid_exists(int(fork)), "it lives on, and holds the parent's pipes and sockets"
        finally:
            if how == "fork":
                os.kill(int(fork), signal.SIGKILL)


class TestRemove:
    async def test_a_process_that_was_removed_leaves_nothing_and_is_dead_at_once(
        self, system: ActorSystem
    ) -> None:
        first = await system.spawn(Echo, "echo", process=True)
        await system.remove("echo")
        descriptors = psutil.Process().num_fds()
        for _ in range(3):
            assert await (await system.spawn(Echo, "echo", process=True)).api.greet("you") == "hello you"
            await system.remove("echo")
            with pytest.raises(ActorDead, match="stopped it"):
                await first.api.greet("you")
        # A socket that is closed lingers for the peer that is not there any more.
        await eventually(lambda: asyncio.to_thread(psutil.Process().num_fds), lambda now: now <= descriptors)
        again = await system.spawn(Echo, "echo", process=True)
        assert await first.api.greet("you") == await again.api.greet("you")


class TestLookup:
    async def test_systems_that_ask_each_other_come_to_an_end(self, private: Path) -> None:
        async with ActorSystem("one", private) as one, ActorSystem("two", private) as two:
            await one.connect(two.address)
            await two.connect(one.address)
            await two.add(Echo(), "echo")
            assert await (await one.lookup("echo", Echo)).api.greet("you") == "hello you"
            with pytest.raises(ActorNotFound, match="nobody"):
                await one.lookup("nobody", Echo, timeout_s=PATIENCE_S)
