"""Settings of the store."""

from ..config_base import Config, Count, Natural
from .segment_arena import ArenaLimits

_DEFAULT = ArenaLimits()


class StoreConfig(Config):
    """The room for samples that are not trained yet: ``memory_bytes`` of shared memory, then ``disk_bytes`` in the
    run's folder, on a disk with ``disk_free_bytes`` left free. If there is no more room, rollouts wait."""

    memory_bytes: Count = _DEFAULT.memory_bytes
    disk_bytes: Natural = _DEFAULT.disk_bytes
    disk_free_bytes: Natural = _DEFAULT.disk_free_bytes

    def limits(self) -> ArenaLimits:
        segment_bytes = min(_DEFAULT.segment_bytes, max(self.memory_bytes, self.disk_bytes))
        return ArenaLimits(segment_bytes, self.memory_bytes, self.disk_bytes, self.disk_free_bytes)
