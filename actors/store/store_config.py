"""Settings of the store."""

from dataclasses import replace
from typing import Annotated, Final

from ..config_base import Config, Count, Natural, Seconds, Unit
from .segment_arena import ArenaLimits

_DEFAULT = ArenaLimits()
_SEGMENTS: Final = 16
"""The least number of segments that a store's memory has room for."""


class StoreConfig(Config):
    """The room for samples that are not trained yet. If there is no more room, rollouts wait."""

    memory_bytes: Annotated[Count, Unit("bytes")] = _DEFAULT.memory_bytes
    """Shared memory for samples. Writers get it in segments of a sixteenth of it, at most 64 MiB."""
    disk_bytes: Annotated[Natural, Unit("bytes")] = _DEFAULT.disk_bytes
    """Disk space in the run's folder, used after the memory."""
    room_timeout_s: Seconds = 1800.0
    """Time in which there was no room, and no sample came or was taken, after which the run ends."""

    def limits(self) -> ArenaLimits:
        """Returns the limits of the segments, in bytes. A small store has small segments: several writers
        have room at once."""
        segment_bytes = min(_DEFAULT.segment_bytes, max(1, self.memory_bytes // _SEGMENTS))
        return replace(
            _DEFAULT, segment_bytes=segment_bytes, memory_bytes=self.memory_bytes, disk_bytes=self.disk_bytes
        )
