"""A set of buffers of another process, as far as it is open in this one."""

import threading
from typing import Any

from ..errors import DeviceError, OpenRefused
from ..handle import BufferSource
from ..host_memory.block import Block
from .devices import DeviceBuffer, Devices


class OpenedBuffers:
    """``control``: the block that orders the use of the set. May be used by several threads."""

    def __init__(self, control: Block, devices: Devices[Any]) -> None:
        self.control = control
        self._devices = devices
        self._open: dict[str, DeviceBuffer] = {}
        self._lock = threading.Lock()
        self._users = 0

    def begin(self) -> bool:
        """Locks the set for a copy; False if its owner writes it, or it was closed here."""
        with self._lock:
            # One lock for all copies of this process: to the kernel they are one holder, and the first to end would end
            # the lock of the others.
            if not self._users and not self.control.use():
                return False
            self._users += 1
            return True

    def end(self) -> None:
        """Acknowledges: the copies are done."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self.control.end()

    def open(self, device: str, part: BufferSource) -> DeviceBuffer:
        """The memory of one buffer, which is opened on ``device`` if it is not open. Raises OpenRefused."""
        with self._lock:
            # Kept open for later versions: to open a handle maps memory of the device, and the writer uses two sets in
            # turn.
            memory = self._open.get(part.handle)
            if memory is None:
                try:
                    memory = self._devices.open(device, bytes.fromhex(part.handle), part.size_bytes)
                except DeviceError as error:
                    raise OpenRefused(device, error.reason) from error
                self._open[part.handle] = memory
                self.control.hold_open()
            return memory

    @property
    def is_of_use(self) -> bool:
        """False if its owner has retired it or ended, and no copy from it is under way."""
        return bool(self._users) or (self.control.is_linked and self.control.has_owner)

    def close(self) -> None:
        """Closes the memory, unless a copy from it has begun; may wait for the device."""
        with self._lock:
            if self._users:
                return
            for memory in self._open.values():
                self._devices.close(memory)
            self._open.clear()
            self.control.close()
