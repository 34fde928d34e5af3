"""Errors of Set and Get."""

from ..core.errors import FlexmarlError


class TransportError(FlexmarlError):
    """Base of the errors of Set and Get."""


class TransportClosed(TransportError):
    """The transport is not open, or was closed during the transfer."""

    def __init__(self) -> None:
        super().__init__("the state transport is closed: use it inside its `async with`")


class NoPath(TransportError):
    """No transfer path reaches the destination."""

    def __init__(self, source: str, destination: str, what: str) -> None:
        super().__init__(f"no transfer path from {source} to {destination} ({what})")
        self.source = source
        self.destination = destination
        self.what = what


class StaleHandle(TransportError):
    """The handle's version was overwritten by a newer one, or its owner has left (``found`` is None)."""

    def __init__(self, key: str, asked: int, found: int | None) -> None:
        there = "nothing: its owner has left" if found is None else f"version {found}"
        super().__init__(f"state {key}: needs version {asked}, found {there}; get a newer handle")
        self.key = key
        self.asked = asked
        self.found = found


class CorruptState(TransportError):
    """The bytes of a state have another digest than the bytes that were set."""

    def __init__(self, key: str, version: int, expected: int | None, found: int) -> None:
        super().__init__(f"state {key}, version {version}: digest {found:#x} instead of {expected or 0:#x}")
        self.key = key
        self.version = version
        self.expected = expected
        self.found = found


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


class UnsafeDirectory(TransportError):
    """The directory for states or segments is missing or open to other users."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(f"states can't be kept in {directory}: {reason}")
        self.directory = directory
        self.reason = reason


class ArenaSpace(TransportError):
    """A state's arena does not fit into the file system of its directory."""

    def __init__(self, needed_bytes: int, free_bytes: int, directory: str) -> None:
        super().__init__(
            f"an arena of {needed_bytes} bytes does not fit into {directory}: {free_bytes} bytes are free; "
            "make the file system larger or choose another directory"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.directory = directory


class SegmentFull(TransportError):
    """The writer's segment has too little room for a batch: it needs another one. Nothing was written."""

    def __init__(self, needed_bytes: int, left_bytes: int) -> None:
        super().__init__(
            f"a batch of {needed_bytes} bytes does not fit into the {left_bytes} bytes left in the segment"
        )
        self.needed_bytes = needed_bytes
        self.left_bytes = left_bytes


class TransferTimeout(TransportError):
    """A transfer took longer than its deadline."""

    def __init__(
        self, operation: str, key: str, version: int, path: str, size_bytes: int, timeout_s: float
    ) -> None:
        super().__init__(
            f"{operation} of state {key}, version {version}: {size_bytes} bytes by path {path} "
            f"took longer than {timeout_s:g} s"
        )
        self.operation = operation
        self.key = key
        self.version = version
        self.path = path
        self.size_bytes = size_bytes
        self.timeout_s = timeout_s
