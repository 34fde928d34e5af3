"""The two processes of ``flexmarl bench tensors``: one sets states, the other gets them."""

import ctypes
import time
from pathlib import Path

import torch
from torch import Tensor

from ...core.actor import Actor, endpoint
from ...transport.handle import StateHandle
from ...transport.state import StateTransport
from ..errors import BenchmarkFailed

_KEY = "weights"


def state_of(size_bytes: int, tensors: int) -> dict[str, Tensor]:
    """``tensors`` of equal size, together ``size_bytes``, whose pages exist."""
    count = size_bytes // 4 // tensors
    return {f"w{n}": torch.full((count,), float(n)) for n in range(tensors)}


def timed_copy_s(size_bytes: int) -> float:
    """Seconds of a copy between two tensors of this process by one call of memcpy; the pages of both exist.

    The shortest of three.
    """
    source, target = (torch.full((size_bytes,), number, dtype=torch.uint8) for number in (1, 2))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size_bytes)
        times.append(time.perf_counter() - started)
    return min(times)


class TensorSetter(Actor):
    """Sets states of a size, as a trainer does."""

    def __init__(self, runtime_dir: str) -> None:
        self._runtime_dir = Path(runtime_dir)
        self._transport = StateTransport(self._runtime_dir)
        self._state: dict[str, Tensor] = {}
        self._version = 0

    async def on_start(self) -> None:
        torch.set_num_threads(1)
        await self._transport.__aenter__()

    async def on_stop(self) -> None:
        await self._transport.close()

    @endpoint
    async def prepare(self, size_bytes: int, tensors: int) -> None:
        """Makes the state of the next ``set`` and ``first_set``."""
        self._state = state_of(size_bytes, tensors)

    @endpoint
    async def copy(self, size_bytes: int) -> float:
        return timed_copy_s(size_bytes)

    @endpoint
    async def set(self) -> tuple[StateHandle, float]:
        """The handle and the seconds that the Set took."""
        self._version += 1
        self._state["w0"].fill_(self._version)
        started = time.perf_counter()
        handle = await self._transport.set(_KEY, self._state, version=self._version)
        return handle, time.perf_counter() - started

    @endpoint
    async def first_set(self, reserved: bool) -> float:
        """Seconds of the first Set of a transport that was opened for it. ``reserved``: its memory exists."""
        async with StateTransport(self._runtime_dir) as transport:
            if reserved:
                await transport.reserve(sum(tensor.nbytes for tensor in self._state.values()), states=1)
            started = time.perf_counter()
            await transport.set("first", self._state, version=0)
            return time.perf_counter() - started


class TensorGetter(Actor):
    """Gets states into tensors that it has, as an engine does."""

    def __init__(self, runtime_dir: str) -> None:
        self._transport = StateTransport(Path(runtime_dir))
        self._into: dict[str, Tensor] = {}

    async def on_start(self) -> None:
        torch.set_num_threads(1)
        await self._transport.__aenter__()

    async def on_stop(self) -> None:
        await self._transport.close()

    @endpoint
    async def prepare(self, size_bytes: int, tensors: int) -> None:
        """Makes the destination of the next ``get``."""
        self._into = state_of(size_bytes, tensors)

    @endpoint
    async def copy(self, size_bytes: int) -> float:
        return timed_copy_s(size_bytes)

    @endpoint
    async def mapped(self, handle: StateHandle) -> float:
        """Seconds until the tensors can be read in place. Raises BenchmarkFailed if they are other ones."""
        started = time.perf_counter()
        async with self._transport.mapped(handle) as tensors:
            seconds = time.perf_counter() - started
            if tensors["w0"][0] != handle.version or tensors["w0"][-1] != handle.version:
                raise BenchmarkFailed("a tensor came out different")
        return seconds

    @endpoint
    async def get(self, handle: StateHandle) -> float:
        """Seconds of a Get into the destination. Raises BenchmarkFailed if the tensors are not those of ``handle``."""
        started = time.perf_counter()
        await self._transport.get(handle, into=self._into)
        seconds = time.perf_counter() - started
        last = f"w{len(self._into) - 1}"
        expected = {"w0": float(handle.version)} | (
            {last: float(len(self._into) - 1)} if last != "w0" else {}
        )
        if any(self._into[name].ne(value).any() for name, value in expected.items()):
            raise BenchmarkFailed("a tensor came out different")
        return seconds
