"""Spawns one actor, prints its pid and the private directory on stderr, and waits to be killed."""

import asyncio
import os
import sys
from pathlib import Path

from flexmarl.core.supervision.supervisor import Supervisor, private_directory
from flexmarl.core.system import ActorSystem


async def main(logs: Path) -> None:
    async with private_directory(logs) as private, ActorSystem("maker", private) as system:
        path = os.pathsep.join(
            [str(Path(__file__).parents[2] / "scripts" / "src"), str(Path(__file__).parent)]
        )
        async with Supervisor(system, private, logs, {"PYTHONPATH": path}) as supervisor:
            await supervisor.spawn("echo:Echo", "echo", {})
            pid = (await supervisor.process_statistics())["echo"].pid
            print(pid, private, file=sys.stderr, flush=True)  # noqa: T201
            await asyncio.wait_for(
                supervisor.wait_failed(), 60
            )  # if no test kills this process, it ends by itself


asyncio.run(main(Path(sys.argv[1])))
