"""The interface of the devices that one process sees. Devices are named by UUID, as ``GPU-...``: two processes may
number the same device differently.

The rules are those of CUDA:

- A copy only begins when it is called; its memory must stay until its event is synchronized. It runs beside the
  computations of the device, after those that its caller names by an event, and no computation waits for it.
- Memory of another process is opened by its handle, on any device of this process that reaches the memory's own, which
  need not be visible. It is never opened in the process that owns it, and once per process. It is closed once, after
  the last copy from it.
- Memory is freed after every process that has opened it has closed it.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..statistics import MemoryUse

if TYPE_CHECKING:
    from torch import Tensor


class DeviceBuffer(Protocol):
    """Memory of a device, or another process's memory that was opened. ``device``: the one that it was opened on."""

    device: str
    size_bytes: int

    @property
    def tensor(self) -> "Tensor":
        """All bytes: uint8, of one dimension."""
        ...


B = TypeVar("B", bound=DeviceBuffer)


class DeviceEvent(Protocol):
    """A point in the copies of a device, or in its computations."""

    def synchronize(self) -> None:
        """Returns when all before this point is done. Raises DeviceError."""
        ...


class Devices(Protocol[B]):
    """The devices that one process sees. Calls may block, and come from several threads."""

    def visible(self) -> list[str]:
        """UUIDs of the devices that this process computes on, its first one first."""
        ...

    def unreachable(self) -> frozenset[tuple[str, str]]:
        """Pairs of different visible devices of which the first can't read the memory of the second."""
        ...

    def memory(self, device: str) -> MemoryUse:
        """The free and all bytes of a device, without using it. Raises UnknownDevice if this process does not see it,
        DeviceError if its driver does not report them."""
        ...

    def device_of(self, tensor: "Tensor") -> str | None:
        """The UUID of the device that a tensor is on; None on the CPU."""
        ...

    def allocate(self, device: str, size_bytes: int) -> B:
        """Raises OutOfDeviceMemory, and UnknownDevice if this process does not see it."""
        ...

    def release_cache(self, device: str) -> None:
        """Gives memory that a library has freed and kept back to the device. Waits for the device."""
        ...

    def free(self, buffer: B) -> None:
        """Waits for the device. Raises DeviceError if another process has it open, or a copy is not done."""
        ...

    def record(self, devices: Collection[str]) -> DeviceEvent:
        """The point after all computations that this thread has begun on the devices, and those of the device's queue
        that all threads share."""
        ...

    def copy(
        self,
        device: str,
        targets: "Sequence[Tensor]",
        sources: "Sequence[Tensor]",
        after: DeviceEvent | None = None,
    ) -> DeviceEvent:
        """Begins to copy every source to its target, by ``device``; either may be on the CPU. ``after``: the point of
        computations that it waits for, of ``record``; None: all that were begun before this call."""
        ...

    def checksum(self, tensor: "Tensor") -> int:
        """The sum of the 64-bit words of uint8 memory, modulo 2**64, by its device; the last word is filled with zeros.

        It finds changed bytes, not exchanged ones.
        """
        ...

    def export(self, buffer: B) -> bytes:
        """The handle by which another process opens the memory."""
        ...

    def open_elsewhere(self, buffer: B, handle: bytes) -> None:
        """Has another process open the exported memory, and close it. Raises DeviceError if it can't."""
        ...

    def open(self, device: str, handle: bytes, size_bytes: int) -> B:
        """Opens memory on ``device``, also that of another device. Raises DeviceError: a handle of this process, opened
        already, of freed memory, of a device that ``device`` does not reach."""
        ...

    def close(self, buffer: B) -> None:
        """Raises DeviceError if it is closed already, or a copy from it is not done."""
        ...

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        """Makes memory of the host fit for fast copies, for all devices; returns the function that undoes it. Raises
        DeviceError."""
        ...

    def make_pinned(self, size_bytes: int) -> "Tensor":
        """New memory of the host, uint8, that is fit for fast copies."""
        ...
