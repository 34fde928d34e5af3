"""Device memory that this process offers: sets of buffers, made and freed by threads, as both wait for the device."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...core.base.threads import in_thread
from ..errors import DeviceError, OutOfDeviceMemory
from ..host_memory.arena import Arena
from ..host_memory.block import Block
from .devices import DeviceBuffer, Devices

# CUDA shares whole pages of this size: a handle of less would show other processes what lies beside it, and two handles
# could be of one page, which a reader can't open twice.
PAGE_BYTES: Final = 2 << 20


def whole_pages(size_bytes: int) -> int:
    """``size_bytes``, rounded up to pages of a device."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class BufferSet:
    """The buffers of one version. ``ranges``: first byte and end of each in the payload; the buffer may be longer.
    ``control``: orders its use (``host_memory/block.py``)."""

    def __init__(self, control: Block, ranges: list[tuple[int, int]]) -> None:
        self.control = control
        self.ranges = ranges
        self.buffers: list[DeviceBuffer] = []
        self.handles: list[str] = []

    def suits(self, ranges: list[tuple[int, int]], device: str) -> bool:
        """True if it is for these ranges, and on this device."""
        return self.ranges == ranges and all(buffer.device == device for buffer in self.buffers)


class BufferSets:
    """Makes sets, and frees those that are retired when their last reader has closed them."""

    def __init__(self, arena: Arena, devices: Devices[Any]) -> None:
        """``arena``: for the control blocks."""
        self._arena = arena
        self._devices = devices
        self._retired: list[BufferSet] = []
        self._freeing = threading.Lock()
        self._refusals: dict[str, str] = {}
        self._probing = asyncio.Lock()

    async def make(
        self, key: str, ranges: list[tuple[int, int]], device: str, count: int, into: list[BufferSet]
    ) -> None:
        """Adds ``count`` sets to ``into``. Raises OutOfDeviceMemory and DeviceError; sets that are whole stay."""

        # Added by the thread, not returned: the result of a cancelled call is lost, and its memory would be.
        def add() -> None:
            for _ in range(count):
                new_set = self._make(key, ranges, device, count)
                into.append(new_set)

        await in_thread(add)

    def _make(self, key: str, ranges: list[tuple[int, int]], device: str, count: int) -> BufferSet:
        new_set = BufferSet(self._arena.take(Block.USERS_BYTES, f"{key}-cuda"), ranges)
        try:
            for start, end in ranges:
                new_set.buffers.append(self._allocate(device, whole_pages(end - start)))
                new_set.handles.append(self._devices.export(new_set.buffers[-1]).hex())
        except BaseException as error:
            self._free(new_set)
            if isinstance(error, OutOfDeviceMemory):
                total = count * sum(whole_pages(end - start) for start, end in ranges)
                raise error.of(key, total) from error
            raise
        return new_set

    def _allocate(self, device: str, size_bytes: int) -> DeviceBuffer:
        allocate: Callable[[str, int], DeviceBuffer] = self._devices.allocate
        try:
            return allocate(device, size_bytes)
        except OutOfDeviceMemory:
            # Memory that PyTorch has freed and keeps for itself is not free for CUDA. Only now: giving it back waits
            # for the device, and the next step has to allocate it again.
            self._devices.release_cache(device)
        return allocate(device, size_bytes)

    async def probe(self, device: str) -> str:
        """The reason why other processes can't open this one's memory of ``device``; empty if they can. It is found
        once, by a process that tries."""
        async with self._probing:
            if device not in self._refusals:
                self._refusals[device] = await in_thread(self._probe, device)
        return self._refusals[device]

    def _probe(self, device: str) -> str:
        buffer = self._allocate(device, PAGE_BYTES)
        try:
            self._devices.open_elsewhere(buffer, self._devices.export(buffer))
        except DeviceError as error:
            return f"other processes can't open memory of device {device}: {error.reason}"
        finally:
            self._devices.free(buffer)
        return ""

    def retire(self, sets: Sequence[BufferSet]) -> None:
        """Makes the handles stale. ``free_retired`` frees the memory when the last reader has closed it."""
        # Not freed at once: CUDA calls it undefined while another process has the memory open.
        for buffer_set in sets:
            buffer_set.control.revoke()
            buffer_set.control.unlink()  # the sign for readers to close it
            self._retired.append(buffer_set)

    async def free_retired(self) -> None:
        """Frees the retired sets that no reader has open."""
        if self._retired:
            # By a thread: it waits until the device has done all that it was given, a whole backward perhaps.
            await in_thread(self._free_unused)

    def _free_unused(self) -> None:
        with self._freeing:
            for buffer_set in [old for old in self._retired if not old.control.is_open]:
                self._retired.remove(buffer_set)
                self._free(buffer_set)

    def _free(self, buffer_set: BufferSet) -> None:
        self._arena.give_back(buffer_set.control)
        for buffer in buffer_set.buffers:
            self._devices.free(buffer)

    @property
    def has_retired(self) -> bool:
        """True while retired memory is not freed."""
        return bool(self._retired)

    def users(self) -> list[int]:
        """The processes that have retired memory open."""
        return sorted({user for buffer_set in self._retired for user in buffer_set.control.users()})
