"""Copies between devices and memory of the host: beside the devices' computations, and through pinned memory."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ...core.telemetry import get_logger
from ..errors import DeviceError
from ..payload import DeviceCopies, torch_kind
from .devices import DeviceEvent, Devices

if TYPE_CHECKING:
    from torch import Tensor

STAGE_BYTES: Final = 64 << 20
# Less is copied as fast unpinned: pinning asks the driver, which takes as long.
_FEWEST_PINNED_BYTES: Final = 1 << 20
log = get_logger(__name__)


class HostCopies:
    """Copies of the devices of one process. May be used by several threads."""

    def __init__(self, devices: Devices[Any]) -> None:
        self._devices = devices
        self._staging = threading.Lock()
        self._stages: list[Tensor] | None = None
        self._refused = ""

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        """Pins memory, if the driver allows that; returns the function that undoes it. From the first refusal on,
        copies go through two buffers that are pinned."""
        if size_bytes >= _FEWEST_PINNED_BYTES and not self._refused:
            try:
                return self._devices.pin(address, size_bytes)
            except DeviceError as error:
                self._refused = str(error)
                log.warning("memory of the host can't be pinned: it is copied twice", reason=self._refused)
        return _do_nothing

    def is_on_device(self, tensor: Any) -> bool:
        """True for a tensor in the memory of a device."""
        # Arrays have no memory of devices, and devices know tensors alone.
        return hasattr(tensor, "untyped_storage") and self._devices.device_of(tensor) is not None

    def after(self, point: DeviceEvent | None) -> "OrderedCopies":
        """Copies after that point of the computations; None: after all that this thread has begun."""
        # The point of the call, not of each copy: a later one would wait for computations that were begun meanwhile.
        return OrderedCopies(self, point or self._devices.record(self._devices.visible()))

    def is_divisible(self, target: "Tensor", source: "Tensor") -> bool:
        """True if a range of bytes of them can be copied. Not through the two buffers: they are for one copy at a time,
        which fills the one while the other is read."""
        return not self._refused and _are_plain(target, source)

    def begin(
        self, target: "Tensor", source: "Tensor", after: DeviceEvent, begin: int = 0, end: int | None = None
    ) -> Callable[[], None]:
        """Begins to copy the bytes from ``begin`` to ``end``, None: to the last, after the point ``after``. Returns the
        function that waits until that is done."""
        if (begin, end) != (0, None):
            target, source = (_as_bytes(tensor)[begin:end] for tensor in (target, source))
        of_target, of_source = self._devices.device_of(target), self._devices.device_of(source)
        device = of_target or of_source
        if device is None:
            torch_kind().write(target, source)
        elif self._refused and (of_target is None) != (of_source is None) and _are_plain(target, source):
            self._copy_staged(device, target, source, after)
        else:
            return self._devices.copy(device, [target], [source], after).synchronize
        return _do_nothing

    def _copy_staged(self, device: str, target: "Tensor", source: "Tensor", after: DeviceEvent) -> None:
        to_host = self._devices.device_of(target) is None
        bytes_to, bytes_from = _as_bytes(target), _as_bytes(source)
        # Two buffers in turn: while the device copies the one, this thread copies the other.
        with self._staging:
            if self._stages is None:
                self._stages = [self._devices.make_pinned(STAGE_BYTES) for _ in range(2)]
            under_way: list[tuple[DeviceEvent, Callable[[], None]]] = []
            for number, start in enumerate(range(0, bytes_to.numel(), STAGE_BYTES)):
                if len(under_way) == 2:
                    _end(under_way.pop(0))
                end = min(start + STAGE_BYTES, bytes_to.numel())
                stage = self._stages[number % 2][: end - start]
                if to_host:
                    event = self._devices.copy(device, [stage], [bytes_from[start:end]], after)
                    under_way.append((event, _copying(bytes_to[start:end], stage)))
                else:
                    stage.copy_(bytes_from[start:end])
                    event = self._devices.copy(device, [bytes_to[start:end]], [stage], after)
                    under_way.append((event, _do_nothing))
            for copy in under_way:
                _end(copy)


class OrderedCopies(DeviceCopies):
    """Copies that wait for the same computations, and for none that are begun later."""

    def __init__(self, copies: HostCopies, after: DeviceEvent) -> None:
        self._copies = copies
        self._after = after

    def is_on_device(self, tensor: Any) -> bool:
        return self._copies.is_on_device(tensor)

    def is_divisible(self, target: Any, source: Any) -> bool:
        return self._copies.is_divisible(target, source)

    def begin(self, target: Any, source: Any, begin: int = 0, end: int | None = None) -> Callable[[], None]:
        return self._copies.begin(target, source, self._after, begin, end)


def _end(copy: tuple[DeviceEvent, Callable[[], None]]) -> None:
    event, then = copy
    event.synchronize()
    then()


def _copying(target: "Tensor", source: "Tensor") -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source)

    return copy


def _are_plain(target: "Tensor", source: "Tensor") -> bool:
    """True if both have the same bytes in the same order."""
    if target.dtype != source.dtype or target.shape != source.shape:
        return False
    return all(
        tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() for tensor in (target, source)
    )


def _as_bytes(tensor: "Tensor") -> "Tensor":
    return tensor.detach().reshape(-1).view(torch_kind().dtype("uint8"))


def _do_nothing() -> None:
    """Nothing was pinned, or nothing follows."""
