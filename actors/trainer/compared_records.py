"""The trainer's way of recording the log-probabilities that it has computed: made in its forwards, sent beside them."""

from collections.abc import Mapping

from ...core.ref import ActorRef
from ..compared_logprobs import Compared, pack_compared
from ..messages import ArchiveApi
from ..record_queue import ANSWER_TIMEOUT_S, RecordKind, RecordQueue, RunBlocking

_QUEUE_BYTES = 16 * 2**20
_WORDS = "the trainer's log-probabilities"
LAST_RECORDS_S = 5.0
"""The longest time in which an actor that stops sends what is left."""


class ComparedRecords:
    """Does nothing if the run records no trajectories."""

    def __init__(self, archive: ActorRef[ArchiveApi] | None, run_blocking: RunBlocking) -> None:
        """``run_blocking``: as of an actor's system."""
        self._queue: RecordQueue[Mapping[str, Compared]] | None = None
        if archive is not None:
            keep = archive.within(ANSWER_TIMEOUT_S).keep_compared
            self._queue = RecordQueue(RecordKind(_WORDS, pack_compared, keep), run_blocking, _QUEUE_BYTES)

    def add(self, samples: Mapping[str, Compared]) -> None:
        """``samples``: by their id."""
        if self._queue is not None and samples:
            size = sum(len(name) + compared.differences.nbytes for name, compared in samples.items())
            self._queue.add(samples, size, len(samples))

    async def run(self) -> None:
        """Sends what is recorded until it is cancelled."""
        if self._queue is not None:
            await self._queue.run()

    async def drain(self) -> None:
        """Sends what is left, within ``LAST_RECORDS_S``. To be called when ``run`` has ended."""
        if self._queue is not None:
            await self._queue.drain(LAST_RECORDS_S)
