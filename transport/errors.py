"""Errors of Set and Get."""

from ..core.errors import FlexmarlError


class TransportError(FlexmarlError):
    """Base of what Set and Get raise."""


class TransportClosed(TransportError):
    """The transport is not open (any more): a transfer was begun or under way."""

    def __init__(self) -> None:
        super().__init__("the state transport is closed: use it inside its `async with`")


class NoPath(TransportError):
    """No transfer path reaches the destination."""

    def __init__(self, source: str, destination: str, what: str) -> None:
        super().__init__(f"no transfer path from {source} to {destination} ({what})")
        self.source = source
        self.destination = destination


class StaleHandle(TransportError):
    """The handle's version was overwritten by the second newer one, or its owner has left (``found`` is None)."""

    def __init__(self, key: str, asked: int, found: int | None) -> None:
        there = "nothing: its owner has left" if found is None else f"version {found}"
        super().__init__(f"state {key}: version {asked} was asked for, found {there}; ask for a newer handle")
        self.key = key
        self.asked = asked
        self.found = found


class CorruptState(TransportError):
    """The bytes of a state are not those that were set: their digests differ."""

    def __init__(self, key: str, version: int, expected: int | None, found: int) -> None:
        super().__init__(f"state {key}, version {version}: digest {found:#x} instead of {expected or 0:#x}")
        self.key = key
        self.version = version
        self.expected = expected
        self.found = found


class StateMismatch(TransportError):
    """The tensors to write into are not those of the state. Nothing was written."""

    def __init__(self, key: str, problems: list[str]) -> None:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        super().__init__(f"state {key} does not fit its destination: {'; '.join(problems[:10])}{more}")
        self.key = key
        self.problems = problems


class ForeignHandle(TransportError):
    """A handle points to something that is not a state of this run."""

    def __init__(self, location: str, directory: str, reason: str) -> None:
        super().__init__(f"handle location {location!r} is refused in {directory}: {reason}")
        self.location = location
        self.directory = directory


class UnsafeDirectory(TransportError):
    """The directory for states is missing or open to other users."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(f"states can't be kept in {directory}: {reason}")
        self.directory = directory


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
    """No segment that this writer was granted has room for a batch: another is needed. Nothing was written."""

    def __init__(self, needed_bytes: int, left_bytes: int) -> None:
        super().__init__(
            f"a batch of {needed_bytes} bytes does not fit into the {left_bytes} that are left of the segment"
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
        self.timeout_s = timeout_s
