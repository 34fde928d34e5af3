"""Spawns one actor, prints its pid and the private directory on stderr, and waits to be killed.

With ``fork`` as second argument it forks after that, and prints the pid of the fork too.
"""

import asyncio
import os
import sys
import time
import warnings
from pathlib import Path

from flexmarl.core.durable.private_directory import private_directory
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem


async def main(logs: Path) -> None:
    async with private_directory(logs) as private, ActorSystem("maker", private) as system:
        path = os.pathsep.join(
            [str(Path(__file__).parents[2] / "scripts" / "src"), str(Path(__file__).parent)]
        )
        node = ProcessNode(system, private, logs, {"PYTHONPATH": path})
        async with Supervisor(system, node) as supervisor:
            await supervisor.spawn("echo:Echo", "echo", {})
            pid = (await supervisor.process_statistics())["echo"].pid
            with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
                # From Python 3.12 on a fork warns of this process's other threads. Users' programs fork all the same.
                fork = os.fork() if "fork" in sys.argv else -1
            if fork == 0:
                os.closerange(0, 3)
                time.sleep(60)  # noqa: ASYNC251  # this process has no loop
                os._exit(0)
            print(pid, private, fork, file=sys.stderr, flush=True)  # noqa: T201
            # If no test kills this process, it ends by itself.
            await asyncio.wait_for(supervisor.wait_failed(), 60)


asyncio.run(main(Path(sys.argv[1])))
