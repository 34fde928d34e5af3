"""A trainer's process, reduced to what it publishes: without transformers it starts in a third of the time.

``python -m tests.actors.inference.weight_sender DIRECTORY DIES_AT WEIGHTS BUFFER_BYTES DEVICE TOTAL_BYTES`` writes the
handle of version 1, waits for a line, and continues with version 2. ``DIES_AT``: the buffer of version 2 at which the
process kills itself; -1: it does not.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from flexmarl.transport import StateHandle
from flexmarl.transport.device_memory import device_memory
from flexmarl.transport.state import StateTransport

from ...fake_devices import FakeDevices


def draw(weights: dict[str, torch.Tensor], version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    for tensor in weights.values():
        tensor.normal_(0.0, 0.5, generator=generator)


class Deadly(FakeDevices):
    """Kills its process when the copy of a buffer begins. ``copies_left``: before that one; -1: it never does."""

    copies_left = -1

    def copy(self, device: str, targets: Any, sources: Any, after: Any = None) -> Any:
        if self.copies_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.copies_left -= 1
        return super().copy(device, targets, sources, after)


async def main(directory: Path, dies_at: int, file: Path, device: str, total: int) -> None:
    weights = torch.load(file)
    devices = Deadly(directory, {device: total})
    async with StateTransport(directory, devices, "cuda_ipc") as transport:
        for version in (1, 2):
            draw(weights, version)
            handle = await transport.set("solver", weights, version=version)
            sys.stdout.write(TypeAdapter(StateHandle).dump_json(handle).decode() + "\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.readline)
            devices.copies_left = dies_at


if __name__ == "__main__":
    torch.set_num_threads(1)
    vars(device_memory)["BUFFER_BYTES"] = int(sys.argv[4])
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[5], int(sys.argv[6])))
