"""State about others that does not accumulate: unknown names, systems that have gone, answers that are not read."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import tracemalloc
from pathlib import Path

import psutil
import pytest

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import ActorDead, Unreachable
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


class Filler(Actor):
    def __init__(self) -> None:
        self.filled = 0

    @endpoint
    async def fill(self, size_bytes: int) -> bytes:
        self.filled += 1
        return bytes(size_bytes)

    @endpoint
    async def count(self) -> int:
        return self.filled

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


async def test_unknown_names_are_forgotten_on_both_sides() -> None:
    async with ActorSystem("serving") as serving, ActorSystem("asking") as asking:
        filler = await serving.add(Filler(), "filler")
        assert await asking.ref("filler", filler.address, Filler).api.count() == 0

        async def ask(number: int) -> None:
            ref = asking.ref(f"missing-{number}", filler.address, Filler)
            await ref.tell("count")
            with pytest.raises(ActorDead, match="no actor of that name"):
                await ref.api.count()

        await asyncio.gather(*(ask(number) for number in range(2000)))
        tracemalloc.start()
        try:
            for turn in range(1, 6):
                await asyncio.gather(*(ask(10_000 * turn + number) for number in range(2000)))
                if turn == 2:
                    early_bytes = _held_bytes()
            assert _held_bytes() < 8 * 2**20
            # 50 times as many names, 100,000, would not hold more than these. The last answers may still be confirmed.
            async with asyncio.timeout(PATIENCE_S):
                while _held_bytes() - early_bytes >= 2**19:
                    await asyncio.sleep(0.01)
        finally:
            tracemalloc.stop()


def _held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def test_systems_that_have_gone_are_forgotten(tmp_path: Path) -> None:
    async with ActorSystem("asking", settings=Settings(connect_timeout_s=0.05)) as asking:
        process, network = psutil.Process(), asking._local.network
        before = process.num_fds()
        most = 0
        for turn in range(20):
            refs = [asking.ref("x", f"ipc://{tmp_path}/{turn}-{number}.sock", Filler) for number in range(20)]
            for error in await asyncio.gather(*(ref.api.count() for ref in refs), return_exceptions=True):
                assert isinstance(error, Unreachable)
            most = max(most, len(network.connections))
            assert len(network.connections) <= 64
        assert most > 40
        # Descriptors are freed by a thread of libzmq.
        async with asyncio.timeout(PATIENCE_S):
            while process.num_fds() > before + 6 * 64:
                await asyncio.sleep(0.01)
        async with ActorSystem("late", tmp_path) as late:
            (tmp_path / "late.sock").rename(tmp_path / "0-0.sock")  # at an address that was forgotten
            await late.add(Filler(), "x")
            again = asking.ref("x", f"ipc://{tmp_path}/0-0.sock", Filler)
            assert await _reached(again) == 0


async def _reached(filler: ActorRef[Filler]) -> int:
    """Its count, once there is a connection."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(Unreachable):
                return await filler.api.count()


async def test_processes_that_have_ended_for_good_are_forgotten() -> None:
    async with ActorSystem("asking") as asking:
        network = asking._local.network
        for number in range(3000):
            address = f"ipc:///tmp/flexmarl-missing-{number}.sock"
            network.watch_process(address)
            network.connection(address)
            network.process_ended(address, ActorDead("x", f"reason {number}"), for_good=True)
        assert (
            len(network._dead) == 256 and len(network.connections) == 256 and not network._watched_processes
        )
        with pytest.raises(ActorDead, match="reason 2999"):
            await asking.ref("x", address, Filler).api.count()


CALLER = """
import asyncio, os, signal, sys
from flexmarl.core import ActorSystem, Settings

async def main():
    async with ActorSystem("caller", settings=Settings(heartbeat_s=60.0)) as system:
        filler = system.ref("filler", sys.argv[1])
        calls = [asyncio.create_task(filler.ask("fill", 10**6, timeout_s=300.0)) for _ in range(1000)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        print(sum(len(answer) for answer in await asyncio.gather(*calls)), flush=True)

asyncio.run(main())
"""


async def test_a_thousand_large_answers_to_a_stopped_caller_fill_no_memory(
    private: Path, tmp_path: Path
) -> None:
    async with ActorSystem("tests", private, log_directory=tmp_path) as system:
        filler = await system.spawn(Filler, "filler", process=True)
        server = psutil.Process(await filler.api.pid())
        assert len(await filler.api.fill(10**6)) == 10**6
        before_bytes = server.memory_info().rss
        caller = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", CALLER, filler.address,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "src")},
        )  # fmt: skip
        assert caller.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert await caller.stdout.readline() == b"stopped\n"
                while psutil.Process(caller.pid).status() != psutil.STATUS_STOPPED:
                    await asyncio.sleep(0.01)
            counts = [await filler.api.count() for _ in range(300)]
            grown_bytes = server.memory_info().rss - before_bytes
            assert counts[-1] < 1000 and grown_bytes < 64 * 2**20
            assert counts[-1] == counts[-100], "nothing is prepared while it does not read"
            os.kill(caller.pid, signal.SIGCONT)
            async with asyncio.timeout(PATIENCE_S):
                assert await caller.stdout.readline() == b"1000000000\n"
                assert await caller.wait() == 0
        finally:
            if caller.returncode is None:
                caller.kill()
                await caller.wait()
