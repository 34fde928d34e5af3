"""Settings of the store."""

from ..config_base import Config, Count, Natural, Seconds
from .segment_arena import ArenaLimits
from .select_pool import SelectLimits

_DEFAULT = ArenaLimits()
_SELECTS = SelectLimits()


class StoreConfig(Config):
    """The room for samples that are not trained yet: ``memory_bytes`` of shared memory, then ``disk_bytes`` in the
    run's folder, on a disk with ``disk_free_bytes`` left free. If there is no more room, rollouts wait; the run ends if
    for ``room_timeout_s`` no sample came or was taken. A worker gets ``segment_bytes`` of it at once, or more for a
    larger group.

    Expressions of ``flexmarl store`` and other clients: ``selects_at_once`` are evaluated at the same time, each for
    ``select_timeout_s`` seconds at most, and ``selects_waiting`` more wait in order; further ones are refused.
    """

    memory_bytes: Count = _DEFAULT.memory_bytes
    disk_bytes: Natural = _DEFAULT.disk_bytes
    disk_free_bytes: Natural = _DEFAULT.disk_free_bytes
    segment_bytes: Count = _DEFAULT.segment_bytes
    room_timeout_s: Seconds = 1800.0
    selects_at_once: Count = _SELECTS.at_once
    selects_waiting: Natural = _SELECTS.waiting
    select_timeout_s: Seconds = _SELECTS.timeout_s

    def limits(self) -> ArenaLimits:
        """The limits of the segments, in bytes: no segment is larger than the medium that it lies in."""
        segment_bytes = min(self.segment_bytes, max(self.memory_bytes, self.disk_bytes))
        return ArenaLimits(segment_bytes, self.memory_bytes, self.disk_bytes, self.disk_free_bytes)

    def select_limits(self) -> SelectLimits:
        """The limits of the queries of outside clients."""
        return SelectLimits(self.selects_at_once, self.selects_waiting, self.select_timeout_s)
