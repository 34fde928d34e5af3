"""Restarts of actors that died."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from flexmarl.core.errors import ActorFailed, TooManyRestarts, is_loss
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.wire.zeromq import Tcp

from ...patience import PATIENCE_S
from ..echo import Worker
from .workers import WORKER, bench, eventually, fate, pid_of


class TestRestart:
    @pytest.mark.parametrize("tcp", [None, Tcp()], ids=["ipc", "tcp"])
    async def test_a_reference_outlives_the_process(
        self, private: Path, tmp_path: Path, tcp: Tcp | None
    ) -> None:
        async with bench(private, tmp_path, tcp=tcp) as made:
            worker = await made.start("worker")
            sibling = await made.start("sibling")
            pid = await worker.api.pid()
            calls = [asyncio.create_task(worker.api.hang()) for _ in range(100)]
            await worker.api.pid()  # they have arrived
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*map(fate, calls)) == ["ActorDead"] * 100
            second = await eventually(lambda: pid_of(worker), lambda new: new not in (0, pid))
            assert await worker.api.pid() == second
            assert (await sibling.api.find("worker")).address == worker.address, "and others find it there"
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    async def test_calls_made_meanwhile_wait_for_the_next_incarnation(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path) as made:
            worker = await made.start("worker")
            pid = await worker.api.pid()
            in_flight = asyncio.create_task(worker.api.hang())
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGSTOP)  # so that no process serves the call below, with any timing
            os.kill(pid, signal.SIGKILL)
            assert await fate(in_flight) == "ActorDead"
            await eventually(lambda: asyncio.sleep(0, made.supervisor.running), lambda names: not names)
            assert await worker.api.pid() != pid

    async def test_calls_made_while_the_next_incarnation_starts_wait_for_it(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path) as made:
            gate = made.diary.with_name("gate")
            gate.touch()
            worker = await made.start("worker", actor_class="echo:SlowToStart")
            pid = await worker.api.pid()
            gate.unlink()
            os.kill(pid, signal.SIGKILL)
            assert await fate(worker.api.hang()) == "ActorDead"
            await eventually(
                lambda: asyncio.to_thread(made.written), lambda lines: lines.count("starting") == 2
            )
            call = asyncio.create_task(worker.api.pid())
            done, _ = await asyncio.wait([call], timeout=0.3)  # in which it would be refused
            assert not done
            gate.touch()
            assert await call != pid

    async def test_a_crash_in_the_actor_counts_like_the_death_of_its_process(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path, intensity=Intensity(1, 60)) as made:
            worker = await made.start("worker")
            pid = await worker.api.pid()
            await worker.api.crash()
            await eventually(lambda: pid_of(worker), lambda new: new not in (0, pid))
            await worker.api.crash()
            with pytest.raises(
                TooManyRestarts, match="worker died: .*restarted 1 times within 60 s.*RuntimeError"
            ) as at:
                await asyncio.wait_for(made.supervisor.wait_failed(), PATIENCE_S)
            assert isinstance(at.value.__cause__, ActorFailed)
            assert (at.value.restarts, at.value.period_s) == (1, 60)
            assert made.supervisor.find("worker") is None
            await eventually(lambda: fate(worker.api.pid()), lambda how: how == "TooManyRestarts")

    async def test_a_start_that_fails_counts_as_the_next_death(self, private: Path, tmp_path: Path) -> None:
        for process, actor_class in ((True, WORKER), (False, Worker)):
            async with bench(private, tmp_path) as made:
                made.diary.write_text("")
                worker = await made.start("worker", process=process, actor_class=actor_class, starts=1)
                await worker.api.crash()
                with pytest.raises(TooManyRestarts, match="restarted 3 times .*started once too often"):
                    await asyncio.wait_for(made.supervisor.wait_failed(), PATIENCE_S)
                assert made.written().count("start worker") == 4
                await eventually(
                    lambda ref=worker: fate(ref.api.pid()),
                    lambda how: how in ("ActorDead", "TooManyRestarts"),
                )

    async def test_an_actor_of_this_process_is_made_anew_and_serves_what_arrived_meanwhile(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path) as made:
            worker = await made.start("worker", process=False, actor_class=Worker)
            hanging = asyncio.create_task(worker.api.hang())
            await worker.api.crash()
            assert await fate(hanging) == "ActorDead"
            assert await worker.api.pid() == os.getpid()
            assert made.written() == ["start worker", "start worker"]
        assert made.written()[-1] == "stop worker"

    async def test_a_failure_that_would_come_again_is_not_followed_by_a_restart(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path, is_restarted=is_loss) as made:
            worker, sibling = await made.start("worker"), await made.start("sibling")
            pid = await sibling.api.pid()
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: pid_of(sibling), lambda new: new not in (0, pid))
            await worker.api.crash()
            with pytest.raises(ActorFailed, match="worker failed: RuntimeError: crashed"):
                await asyncio.wait_for(made.supervisor.wait_failed(), PATIENCE_S)
            assert made.written().count("start worker") == 1

    async def test_one_that_is_stopped_is_killed_and_restarted_when_another_actor_has_lost_it(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path) as made:
            worker = await made.start("worker")
            pid, incarnation = await worker.api.pid(), await worker.api.incarnation()
            os.kill(pid, signal.SIGSTOP)
            await made.supervisor.ref.api.lost("worker", incarnation, "silent")
            second = await eventually(lambda: pid_of(worker), lambda new: new not in (0, pid))
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
            await made.supervisor.ref.api.lost("worker", incarnation, "silent")
            await made.supervisor.ref.api.lost("nobody", incarnation, "silent")
            assert await worker.api.pid() == second, "the next incarnation is not the one that was lost"
