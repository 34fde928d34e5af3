"""Memory lent to training states that no state lies in at present, for the next one of any policy."""

import math
from collections.abc import Callable
from typing import Final

from ....transport.errors import ArenaSpace
from ....transport.handle import LentMemory
from ....transport.state import StateTransport

# A piece much larger than a state is left for larger ones.
_MOST_WASTE: Final = 1.25
_SMALL_BYTES: Final = 1 << 20


class SpareMemory:
    """Pieces of ``transport``. ``most_bytes``: kept at most, and no more than ``room_bytes`` returns; what is given
    back beyond them is freed, the oldest first."""

    def __init__(self, transport: StateTransport, room_bytes: Callable[[], float] = lambda: math.inf) -> None:
        self.most_bytes = 0
        self._room_bytes = room_bytes
        self._transport = transport
        self._pieces: list[LentMemory] = []

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(piece.size_bytes for piece in self._pieces)

    async def take(self, key: str, size_bytes: int) -> LentMemory:
        """A piece for ``size_bytes``: the best fitting one, or a new one, named after ``key``. Raises ArenaSpace."""
        most_bytes = max(_MOST_WASTE * size_bytes, size_bytes + _SMALL_BYTES)
        fitting = [
            piece
            for piece in self._pieces
            # The state before may still be read for a host that was cut off: a state does not wait for that.
            if size_bytes <= piece.size_bytes <= most_bytes and not self._transport.is_used(piece)
        ]
        if fitting:
            piece = min(fitting, key=lambda piece: piece.size_bytes)
            self._pieces.remove(piece)
            return piece
        try:
            return await self._transport.lend(key, size_bytes)
        except ArenaSpace:
            if not self._pieces:
                raise
            self._transport.take_back(self._pieces)
            self._pieces.clear()
            return await self._transport.lend(key, size_bytes)

    def give_back(self, piece: LentMemory) -> None:
        """No state lies in ``piece`` any more."""
        self._pieces.append(piece)
        self.free_excess()

    def free_excess(self) -> None:
        """Frees what there is no room for any more."""
        while self._pieces and self.size_bytes > min(self.most_bytes, self._room_bytes()):
            self._transport.take_back([self._pieces.pop(0)])
