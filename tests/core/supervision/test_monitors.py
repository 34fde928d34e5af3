"""Monitors of actors."""

import asyncio
import os
import signal
from pathlib import Path

from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef

from ...patience import PATIENCE_S
from ..echo import Worker
from .workers import bench, eventually


class TestWatch:
    async def test_each_end_is_told_once_with_its_reason(self, private: Path, tmp_path: Path) -> None:
        async with bench(private, tmp_path) as made:
            watcher = await made.start("watcher")
            killed, stopped = await made.start("killed"), await made.start("stopped")
            local = await made.start("local", process=False, actor_class=Worker)
            nobody = made.system.ref("nobody", killed.address, Worker)
            for ref in (killed, stopped, local, nobody):
                await watcher.api.watch_it(ref)
            pid = await killed.api.pid()
            for ref in (killed, stopped, local):
                await watched(ref)
            await eventually(watcher.api.seen, lambda seen: [dead.actor for dead in seen] == ["nobody"])
            os.kill(pid, signal.SIGKILL)
            await made.system.remove("stopped")
            await made.system.remove("local")
            seen = await eventually(watcher.api.seen, lambda seen: len(seen) >= 4)
            assert sorted((dead.actor, dead.stopped) for dead in seen) == [
                ("killed", False), ("local", True), ("nobody", False), ("stopped", True),
            ]  # fmt: skip
            reasons = {dead.actor: dead.reason for dead in seen}
            assert "no actor of that name" in reasons["nobody"]
            assert "ended or closed the connection" in reasons["killed"]
            assert (reasons["stopped"], reasons["local"]) == ("stopped was closed", "tests stopped it")

    async def test_a_process_that_hangs_is_dead_after_missed_heartbeats(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path, settings=Settings(heartbeat_s=1.0)) as made:
            watcher = Worker(str(made.diary))
            await made.system.add(watcher, "watcher")
            hangs = await made.start("hangs")
            watcher.watch(hangs)
            await watched(hangs)
            pid = await hangs.api.pid()
            os.kill(pid, signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_S):
                while not watcher.deaths:
                    await asyncio.sleep(0.005)
            assert "silent for" in watcher.deaths[0].reason and not watcher.deaths[0].stopped
            os.kill(pid, signal.SIGKILL)

    async def test_a_watcher_that_ends_first_is_forgotten(self, private: Path, tmp_path: Path) -> None:
        async with bench(private, tmp_path) as made:
            watcher = await made.start("watcher")
            local = await made.system.add(Worker(str(made.diary)), "local")
            await watcher.api.watch_it(local)

            await watched(local)
            await made.system.remove("watcher")
            await watched(local, 0)


async def watched(ref: ActorRef[Worker], count: int = 1) -> None:
    """Returns once so many watch it."""
    await eventually(ref.api.watchers, lambda found: found == count)
