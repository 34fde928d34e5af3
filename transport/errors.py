"""Errors of Set and Get."""

from collections.abc import Mapping, Sequence

from ..core.errors import FlexmarlError


class TransportError(FlexmarlError):
    """Base of the errors of Set and Get."""


class TransportClosed(TransportError):
    """The transport is not open, or was closed during the transfer."""

    def __init__(self) -> None:
        super().__init__("the state transport is closed: use it inside its `async with`")


class NoPath(TransportError):
    """No source of a state reaches the reader, or not the one that it demands. ``refused``: the reason, by path."""

    def __init__(
        self, reader: str, devices: Sequence[str], size_bytes: int, refused: Mapping[str, str]
    ) -> None:
        why = "; ".join(f"path {path!r}: {reason}" for path, reason in refused.items()) or "no source"
        super().__init__(
            f"no transfer path to {reader} ({size_bytes} bytes to {', '.join(devices) or 'no device'}): {why}"
        )
        self.reader = reader
        self.devices = list(devices)
        self.size_bytes = size_bytes
        self.refused = dict(refused)


class StaleHandle(TransportError):
    """A newer version has replaced the handle's. ``newest``: that version; None if the owner has left."""

    def __init__(self, key: str, version: int, newest: int | None) -> None:
        present = "nothing: its owner has left" if newest is None else f"version {newest}"
        super().__init__(f"state {key}: needs version {version}, found {present}; get a newer handle")
        self.key = key
        self.version = version
        self.newest = newest


class CorruptState(TransportError):
    """The bytes of a state have another digest than the bytes that were set."""

    def __init__(self, key: str, version: int, expected: int | None, actual: int) -> None:
        super().__init__(f"state {key}, version {version}: digest {actual:#x} instead of {expected or 0:#x}")
        self.key = key
        self.version = version
        self.expected = expected
        self.actual = actual


class StateMismatch(TransportError):
    """The destination has other names, shapes or dtypes than the state. Nothing was written."""

    def __init__(self, key: str, problems: list[str]) -> None:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        super().__init__(f"state {key} does not fit its destination: {'; '.join(problems[:10])}{more}")
        self.key = key
        self.problems = problems


class ForeignHandle(TransportError):
    """A handle or reference does not name a state or segment of this run."""

    def __init__(self, location: str, directory: str, reason: str) -> None:
        super().__init__(f"handle location {location!r} is refused in {directory}: {reason}")
        self.location = location
        self.directory = directory
        self.reason = reason


class ArenaSpace(TransportError):
    """The memory for a state does not fit into the file system of its directory."""

    def __init__(self, needed_bytes: int, free_bytes: int, directory: str, key: str = "") -> None:
        super().__init__(
            f"{f'state {key}: ' if key else ''}an arena of {needed_bytes} bytes does not fit into {directory}: "
            f"{free_bytes} bytes are free; make the file system larger or choose another directory"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.directory = directory
        self.key = key

    def of(self, key: str) -> "ArenaSpace":
        """The same error, of the state ``key``."""
        return ArenaSpace(self.needed_bytes, self.free_bytes, self.directory, key)


class MemoryInUse(TransportError):
    """The memory for a state is written by another process, or a reader uses it in place. Nothing was written."""

    def __init__(self, key: str, version: int, block: str) -> None:
        super().__init__(f"state {key}, version {version}: the memory {block} is in use")
        self.key = key
        self.version = version
        self.block = block


class DeviceError(TransportError):
    """A call of a device failed. ``device``: its UUID."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"device {device}: {reason}")
        self.device = device
        self.reason = reason


class UnknownDevice(DeviceError):
    """This process does not see the device, or no device at all."""

    def __init__(self, device: str, visible: Sequence[str]) -> None:
        super().__init__(
            device, f"this process does not see it (visible: {', '.join(visible) or 'no device'})"
        )
        self.visible = list(visible)


class OpenRefused(DeviceError):
    """Device memory of another process can't be opened by this one. Nothing was copied."""


class OutOfDeviceMemory(DeviceError):
    """A device has too little free memory. Nothing was allocated. ``key``: of the state, whose memory there has
    ``total_bytes``; empty if it has none."""

    def __init__(
        self, device: str, needed_bytes: int, free_bytes: int, key: str = "", total_bytes: int = 0
    ) -> None:
        of_state = (
            f"; state {key} needs {total_bytes} bytes there in all, beside what computes: leave it that much, "
            "or offer it in the host's memory (weights.path=shm)"
        )
        super().__init__(
            device,
            f"{needed_bytes} bytes do not fit: {free_bytes} bytes are free{of_state if key else ''}",
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.key = key
        self.total_bytes = total_bytes

    def of(self, key: str, total_bytes: int) -> "OutOfDeviceMemory":
        """The same error, of the state ``key``, whose memory has ``total_bytes``."""
        return OutOfDeviceMemory(self.device, self.needed_bytes, self.free_bytes, key, total_bytes)


class NotAcknowledged(TransportError):
    """Memory that readers still use could not be written or freed within the deadline. ``readers``: process ids."""

    def __init__(self, key: str, buffers: str, readers: Sequence[int], timeout_s: float) -> None:
        names = ", ".join(map(str, readers)) or "unknown"
        super().__init__(
            f"state {key}: device memory {buffers} was not acknowledged within {timeout_s:g} s by process {names}"
        )
        self.key = key
        self.buffers = buffers
        self.readers = list(readers)
        self.timeout_s = timeout_s


class FetchFailed(TransportError):
    """A state of another host could not be fetched from ``peer`` (host and port). ``missing_range``: the number of
    the first range that has not arrived. ``got_bytes``: those that have. Nothing was written to the destination."""

    def __init__(
        self,
        key: str,
        version: int,
        peer: str,
        missing_range: int,
        got_bytes: int,
        size_bytes: int,
        reason: str,
    ) -> None:
        super().__init__(
            f"state {key}, version {version}: {got_bytes} of {size_bytes} bytes came from {peer}, "
            f"range {missing_range} did not: {reason}"
        )
        self.key = key
        self.version = version
        self.peer = peer
        self.missing_range = missing_range
        self.got_bytes = got_bytes
        self.size_bytes = size_bytes
        self.reason = reason


class PeerRefused(FetchFailed):
    """The peer does not have the keys of this run, or does not accept the reader's."""


class RangesLost(TransportError):
    """Bytes that another process serves by name can't be fetched. ``address``: its host and port. ``ranges``: the
    number of those that are missing."""

    def __init__(self, address: str, ranges: int, reason: str) -> None:
        plural = "" if ranges == 1 else "s"
        super().__init__(f"{ranges} range{plural} of bytes can't be fetched from {address}: {reason}")
        self.address = address
        self.ranges = ranges
        self.reason = reason


class TransferTimeout(TransportError):
    """A transfer took longer than its deadline. ``progress``: words about how far it has come, if its path has some."""

    def __init__(
        self,
        operation: str,
        key: str,
        version: int,
        path: str,
        size_bytes: int,
        timeout_s: float,
        progress: str = "",
    ) -> None:
        super().__init__(
            f"{operation} of state {key}, version {version}: {size_bytes} bytes by path {path} "
            f"took longer than {timeout_s:g} s{f' ({progress})' if progress else ''}"
        )
        self.operation = operation
        self.key = key
        self.version = version
        self.path = path
        self.size_bytes = size_bytes
        self.timeout_s = timeout_s
        self.progress = progress
