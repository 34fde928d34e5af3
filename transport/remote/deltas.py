"""The changes between two versions of a state, for all readers that have the older one."""

import threading
from concurrent.futures import Future
from typing import Final

from ..host_memory.block import CHUNK_BYTES, Block
from . import delta

# After so many chunks of which none has a small delta, no more are computed.
_TRIED_CHUNKS: Final = 16


class Deltas:
    """The changes chunk by chunk, each computed once: by the thread that comes first, for which others wait.

    The blocks must stay as they are while changes are computed. All methods may be called by several threads.
    """

    def __init__(self, old: Block, new: Block, size_bytes: int) -> None:
        # A block that is being written has an odd generation, and the next one when it is published.
        self.pair = (old.name, old.generation, new.name, new.generation + new.generation % 2)
        self._old, self._new = old, new
        self._size_bytes = -(-size_bytes // 8) * 8  # memory ends with a page
        self._lock = threading.Lock()
        self._futures: dict[int, Future[bytes | None]] = {}
        self._computed = 0
        self._small = 0

    def of(self, start: int, end: int) -> bytes | None:
        """The changes of a range; None if they are not much smaller than it."""
        deltas = []
        for chunk in range(start, end, CHUNK_BYTES):
            changes = self._chunk(chunk)
            if changes is None:
                return None
            deltas.append(changes)
        return b"".join(deltas)

    def compute(self, start: int) -> None:
        """Computes those of the chunk that begins there, which is in the cache: its thread has just written it."""
        self._chunk(start)

    def _chunk(self, start: int) -> bytes | None:
        with self._lock:
            future = self._futures.get(start)
            if future is None:
                if self._computed >= _TRIED_CHUNKS and not self._small:
                    return None
                mine = self._futures[start] = Future()
        if future is not None:
            return future.result()
        end = min(start + CHUNK_BYTES, self._size_bytes)
        try:
            changes = delta.encode(self._old.payload[start:end], self._new.payload[start:end])
        except BaseException as error:
            with self._lock:
                del self._futures[start]
            mine.set_exception(error)  # else those that wait would wait for ever
            raise
        with self._lock:
            self._computed += 1
            self._small += changes is not None
        mine.set_result(changes)
        return changes
