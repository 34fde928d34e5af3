"""An actor that takes arrays and tensors; spawned by class path, so it lives in a module of its own."""

import asyncio
from dataclasses import dataclass

import numpy as np

from flexmarl.core.actor import Actor, endpoint
from flexmarl.transport.message_arrays import Array


@dataclass(frozen=True)
class Batch:
    tokens: Array
    logprobs: Array
    extra: dict[str, Array]


class Carrier(Actor):
    def __init__(self) -> None:
        self.kept: np.ndarray | None = None

    @endpoint
    async def array(self, array: np.ndarray) -> np.ndarray:
        assert array.flags.writeable and array.flags.aligned
        return array

    @endpoint
    async def batch(self, batch: Batch) -> Batch:
        return batch

    @endpoint
    async def add_one(self, array: np.ndarray) -> float:
        """Writes to what it has received."""
        array += 1
        return float(array.sum())

    @endpoint
    async def lend(self, size: int) -> np.ndarray:
        """Ones, which change as soon as they are on their way."""
        array = np.ones(size)
        asyncio.get_running_loop().call_soon(array.fill, 2.0)
        return array

    @endpoint
    async def total(self, array: np.ndarray | None = None) -> float:
        return -1.0 if array is None else float(array.sum())
