"""Errors of segments."""

from ...transport.errors import TransportError


class SegmentFull(TransportError):
    """The writer's segment has too little room for a batch: it needs another one. Nothing was written."""

    def __init__(self, needed_bytes: int, left_bytes: int) -> None:
        super().__init__(
            f"a batch of {needed_bytes} bytes does not fit into the {left_bytes} bytes left in the segment"
        )
        self.needed_bytes = needed_bytes
        self.left_bytes = left_bytes


class PieceLost(TransportError):
    """Bytes in segments of another host's writer can't be fetched. ``place``: the writer's address and name.
    ``refs``: how many references were asked for."""

    def __init__(self, place: str, refs: int, reason: str) -> None:
        super().__init__(f"{refs} values in memory of {place} can't be fetched: {reason}")
        self.place = place
        self.refs = refs
        self.reason = reason
