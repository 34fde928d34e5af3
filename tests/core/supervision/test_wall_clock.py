"""Restarts while the wall clock is set back."""

import asyncio
import os
import signal
from pathlib import Path

from flexmarl.core.errors import ActorDead
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from ..echo import Echo
from .workers import eventually

CLOCK = """
import os, time
offset_s = float(open(os.environ["FAKE_CLOCK"]).read())
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + offset_s
time.time_ns = lambda: real_ns() + int(offset_s * 1e9)
"""


async def greeting(echo: ActorRef[Echo]) -> str:
    """The answer of its next incarnation."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await echo.within(PATIENCE_S).greet("world")
            except ActorDead:
                await asyncio.sleep(0.01)


async def pid_of_echo(supervisor: Supervisor) -> int:
    """Its process, once the supervisor knows that it has started: it may answer others before."""
    figures = await eventually(supervisor.process_statistics, lambda found: "echo" in found)
    return int(figures["echo"].pid)


async def test_an_actor_that_is_restarted_after_the_clock_was_set_back_an_hour_is_reachable(
    system: ActorSystem, private: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    offset = tmp_path / "offset"
    sources = Path(__file__).parents[3] / "scripts" / "src"
    path = os.pathsep.join([str(tmp_path), str(sources), str(Path(__file__).parents[1])])
    environment = {"PYTHONPATH": path, "FAKE_CLOCK": str(offset)}
    offset.write_text("0")
    async with Supervisor(
        system, ProcessNode(system, private, tmp_path, environment),
        intensity=Intensity(max_restarts=3, period_s=600.0),
    ) as supervisor:  # fmt: skip
        await supervisor.spawn("echo:Echo", "echo", {})
        echo = supervisor.reference("echo", Echo)
        async with ActorSystem("other") as other:
            theirs = other.ref("echo", echo.address, Echo)
            for hours in (-1, -2):
                for ref in (echo, theirs):
                    assert await ref.api.greet("world") == "hello world"
                offset.write_text(str(3600 * hours))
                pid = await pid_of_echo(supervisor)
                os.kill(pid, signal.SIGKILL)
                for ref in (echo, theirs):
                    assert await greeting(ref) == "hello world"
                assert await pid_of_echo(supervisor) != pid
