"""A process that sets states: ``peer.py DIRECTORY VERSIONS ELEMENTS``.

Writes one handle as a line of JSON per version, every array filled with the version's number, then waits for the end
of its standard input. Arrays of NumPy: the process starts in a third of the time that torch takes.
"""

import asyncio
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import structlog

from flexmarl.transport.state import StateTransport


async def main(directory: Path, versions: int, elements: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    async with StateTransport(directory) as transport:
        state = {name: np.empty(elements // 4, np.float32) for name in "abcd"}
        for version in range(versions):
            for array in state.values():
                array.fill(version)
            handle = await transport.set("weights", state, version=version)
            print(json.dumps(asdict(handle)), flush=True)  # noqa: T201  # the protocol with the test
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
