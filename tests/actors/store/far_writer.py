"""A process that writes samples as a rollout worker on another host does: ``far_writer.py KEYS ADDRESS DIRECTORY``.

Puts a group of four samples with its report, writes a line, and waits.
"""

import asyncio
import sys
from pathlib import Path

from flexmarl.actors.columns.store_client import ExperienceWriter, segment_directories, writer_node
from flexmarl.actors.messages import StoreApi
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.zeromq import Tcp

from .test_store import report, sample


async def main(keys: Path, address: str, directory: Path) -> None:
    async with ActorSystem("rollout-0", directory, tcp=Tcp(keys=Keys.load(keys))) as system:
        store = system.ref("store", address, StoreApi)
        node = writer_node(system, "rollout-0-a", "rollout-0-", encrypted=True)
        places = segment_directories(directory, directory / "nothing")
        await ExperienceWriter(store, "rollout-0-a", places, node).put(
            [sample(number) for number in range(4)], report("q0")
        )
        print("put", flush=True)  # noqa: T201  # the protocol with the test
        await asyncio.Event().wait()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
