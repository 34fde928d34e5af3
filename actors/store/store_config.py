"""Settings of the store."""

from typing import Annotated

from ..config_base import Config, Count, Natural, Seconds, Unit
from .segment_arena import ArenaLimits
from .select_pool import SelectLimits

_DEFAULT = ArenaLimits()
_SELECTS = SelectLimits()


class StoreConfig(Config):
    """The room for samples that are not trained yet. If there is no more room, rollouts wait. Limits of the expressions
    of ``flexmarl store`` and other clients."""

    memory_bytes: Annotated[Count, Unit("bytes")] = _DEFAULT.memory_bytes
    """Shared memory for samples."""
    disk_bytes: Annotated[Natural, Unit("bytes")] = _DEFAULT.disk_bytes
    """Disk space in the run's folder, used after the memory."""
    disk_free_bytes: Annotated[Natural, Unit("bytes")] = _DEFAULT.disk_free_bytes
    """Space that stays free on the disk."""
    segment_bytes: Annotated[Count, Unit("bytes")] = _DEFAULT.segment_bytes
    """Room that a rollout worker gets at once, or more for a larger group."""
    room_timeout_s: Seconds = 1800.0
    """Time in which there was no room, and no sample came or was taken, after which the run ends."""
    selects_at_once: Annotated[Count, Unit("expressions")] = _SELECTS.at_once
    """Expressions of `flexmarl store` and other clients that are evaluated at the same time."""
    selects_waiting: Annotated[Natural, Unit("expressions")] = _SELECTS.waiting
    """Most expressions that wait for that, in order. Further ones are refused."""
    select_timeout_s: Seconds = _SELECTS.timeout_s
    """Limit of one evaluation of an expression."""

    def limits(self) -> ArenaLimits:
        """The limits of the segments, in bytes: no segment is larger than the medium that it lies in."""
        segment_bytes = min(self.segment_bytes, max(self.memory_bytes, self.disk_bytes))
        return ArenaLimits(segment_bytes, self.memory_bytes, self.disk_bytes, self.disk_free_bytes)

    def select_limits(self) -> SelectLimits:
        """The limits of the queries of outside clients."""
        return SelectLimits(self.selects_at_once, self.selects_waiting, self.select_timeout_s)
