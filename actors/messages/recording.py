"""Messages between rollout workers, trainers and the file of recorded trajectories."""

from typing import Protocol

from ...core.actor import endpoint


class ArchiveApi(Protocol):
    """The keeper of the run's file of recorded trajectories (``recorded_trajectory.py``)."""

    @endpoint
    async def keep(self, records: list[bytes], dropped: int) -> int:
        """Adds records, each as ``compress_record`` returns it. A record replaces the one of the same query and step: a
        group that begins again has one. ``dropped``: trajectories that the sender had no room for since its last call.
        Returns how many trajectories are dropped here: the file can't be written, or has reached its limit. Returns
        when the others are in the file."""

    @endpoint
    async def keep_compared(self, records: list[bytes], dropped: int) -> int:
        """Adds records, each as ``pack_compared`` returns it. Of a sample that comes again the newest counts.
        ``dropped`` and the result: as of ``keep``, of samples."""
