"""A process that reads a store over TCP, as one on another host would: ``far_reader.py KEYS ADDRESS DIRECTORY COUNT``.

Leases COUNT rows of the solver and writes them as a line of JSON. DIRECTORY is empty: no segment of the store can be
seen from there.
"""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from flexmarl.actors.columns.store_client import ExperienceReader, segment_directories
from flexmarl.actors.messages import StoreApi
from flexmarl.actors.names import PolicyName
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys


async def main(keys: Path, address: str, directory: Path, count: int) -> None:
    async with ActorSystem("far", keys=Keys.load(keys)) as system:
        store = system.ref("store", address, StoreApi)
        reader = ExperienceReader(store, segment_directories(directory / "memory", directory / "folder"))
        leased = await store.api.lease(PolicyName("solver"), 0, count)
        samples = await reader.samples(leased)
        columns = await reader.columns(leased)
        cells = await reader.arrays(leased)
        told = {
            "samples": [dataclasses.asdict(sample) for sample in samples],
            "plan": [None if plan is None else plan.tolist() for plan in columns["plan"]],
            "embedding": [array.tolist() for array in columns["embedding"]],
            "note": columns["note"],
            "aligned": all(array.flags.aligned for arrays in cells.values() for array in arrays),
            "writeable": any(array.flags.writeable for arrays in cells.values() for array in arrays),
        }
        print(json.dumps(told), flush=True)  # noqa: T201  # the protocol with the test


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
