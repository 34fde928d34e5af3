"""A process that sets states: ``peer.py DIRECTORY VERSIONS ELEMENTS``.

Writes one handle as a line of JSON per version, every tensor filled with the version's number, then waits
for the end of its standard input.
"""

import asyncio
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

import structlog
import torch

from flexmarl.transport.state import StateTransport


async def main(directory: Path, versions: int, elements: int) -> None:
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    async with StateTransport(directory) as transport:
        state = {name: torch.empty(elements // 4) for name in "abcd"}
        for version in range(versions):
            for tensor in state.values():
                tensor.fill_(version)
            handle = await transport.set("weights", state, version=version)
            print(json.dumps(asdict(handle)), flush=True)  # noqa: T201  # the protocol with the test
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
