"""The interface of the devices that one process sees. Devices are named by UUID, as ``GPU-...``: two processes may
number the same device differently.

The rules are those of CUDA:

- A copy only begins when it is called; its memory must stay until its event is synchronized.
- Memory of another process is opened by its handle, on any device of this process that reaches the memory's own, which
  need not be visible. It is never opened in the process that owns it, and once per process. It is closed once, after
  the last copy from it.
- Memory is freed after every process that has opened it has closed it.
"""

from collections.abc import Callable, Sequence
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
    """A point in the copies of a device."""

    def synchronize(self) -> None:
        """Returns when all copies before this point are done. Raises DeviceError."""
        ...


class Devices(Protocol[B]):
    """The devices that one process sees. Calls may block, and come from several threads."""

    def visible(self) -> list[str]:
        """UUIDs, the process's first device first."""
        ...

    def unreachable(self) -> frozenset[tuple[str, str]]:
        """Pairs of different visible devices of which the first can't read the memory of the second."""
        ...

    def memory(self, device: str) -> MemoryUse:
        """The free and all bytes of a device. Raises UnknownDevice if this process does not see it."""
        ...

    def device_of(self, tensor: "Tensor") -> str | None:
        """The UUID of the device that a tensor is on; None on the CPU."""
        ...

    def allocate(self, device: str, size_bytes: int) -> B:
        """Raises OutOfDeviceMemory, and UnknownDevice if this process does not see it."""
        ...

    def free(self, buffer: B) -> None:
        """Raises DeviceError if another process has it open, or a copy is not done."""
        ...

    def copy(self, device: str, targets: "Sequence[Tensor]", sources: "Sequence[Tensor]") -> DeviceEvent:
        """Begins to copy every source to its target, by ``device``; either may be on the CPU."""
        ...

    def checksum(self, tensor: "Tensor") -> int:
        """The sum of the 64-bit words of uint8 memory, modulo 2**64, by its device; the last word is filled with zeros.

        It finds changed bytes, not exchanged ones.
        """
        ...

    def export(self, buffer: B) -> bytes:
        """The handle by which another process opens the memory."""
        ...

    def open(self, device: str, handle: bytes, size_bytes: int) -> B:
        """Opens memory on ``device``, also that of another device. Raises DeviceError: a handle of this process, opened
        already, of freed memory, of a device that ``device`` does not reach."""
        ...

    def close(self, buffer: B) -> None:
        """Raises DeviceError if it is closed already, or a copy from it is not done."""
        ...

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        """Makes memory of the host fit for fast copies; returns the function that undoes it."""
        ...
