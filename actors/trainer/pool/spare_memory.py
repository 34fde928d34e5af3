"""Memory lent to training states that no state lies in at present, for the next one of any policy.

A piece on the wrong side of the host is taken before a new one is made: a copy across the link between the processors
takes less time than new pages, and there is memory for one spare piece. So gangs whose ranks are on both sides, and
slots that are all on one, have all states near; of policies with one slot each, on both sides, some are far.
"""

import math
from collections.abc import Callable
from typing import Final

from ....core.errors import FlexmarlError, is_loss
from ....transport.errors import ArenaSpace
from ....transport.handle import LentMemory
from ...messages import StateLender

# A piece much larger than a state is left for larger ones.
_MOST_WASTE: Final = 1.25
_SMALL_BYTES: Final = 1 << 20


class SpareMemory:
    """Pieces of ``lender``. ``most_bytes``: kept at most, and no more than ``room_bytes`` returns; what is given
    back beyond them is freed, the oldest first. ``lent_bytes``: of all pieces, those that states lie in included."""

    def __init__(self, lender: StateLender, room_bytes: Callable[[], float] = lambda: math.inf) -> None:
        self.most_bytes = 0
        self.lent_bytes = 0
        self.room_bytes = room_bytes
        self._lender = lender
        self._pieces: list[LentMemory] = []

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(piece.size_bytes for piece in self._pieces)

    async def take(self, key: str, size_bytes: int, side: int | None = None) -> LentMemory:
        """A piece for ``size_bytes``: the best fitting one of ``side``, that of another one, or a new one, named after
        ``key``. Raises ArenaSpace."""
        if (piece := await self._fitting(size_bytes, side)) is not None:
            return piece
        await self.free_excess()
        try:
            return await self.lend(key, size_bytes, side)
        except ArenaSpace:
            if not self._pieces:
                raise
            pieces, self._pieces = self._pieces, []
            await self.free(pieces)
            return await self.lend(key, size_bytes, side)

    async def _fitting(self, size_bytes: int, side: int | None) -> LentMemory | None:
        most_bytes = max(_MOST_WASTE * size_bytes, size_bytes + _SMALL_BYTES)
        for piece in sorted(self._pieces, key=lambda piece: (piece.side != side, piece.size_bytes)):
            if size_bytes <= piece.size_bytes <= most_bytes and piece in self._pieces:
                self._pieces.remove(piece)
                # The state before may still be read for a host that was cut off: a state does not wait for that.
                if not await self._lender.is_used(piece):
                    return piece
                self._pieces.append(piece)
        return None

    async def lend(self, key: str, size_bytes: int, side: int | None = None) -> LentMemory:
        """A new piece, on ``side`` of the host. Raises ArenaSpace."""
        piece = await self._lender.lend(key, size_bytes, side)
        self.lent_bytes += piece.size_bytes
        return piece

    def give_back(self, piece: LentMemory) -> None:
        """No state lies in ``piece`` any more."""
        self._pieces.append(piece)

    async def free(self, pieces: list[LentMemory]) -> None:
        """Frees ``pieces``, which are not kept."""
        self.lent_bytes -= sum(piece.size_bytes for piece in pieces)
        if not pieces:
            return
        try:
            await self._lender.take_back(pieces)
        except FlexmarlError as error:
            if not is_loss(error):  # else the memory is gone with its host
                raise

    async def free_excess(self) -> None:
        """Frees what there is no room for any more."""
        excess: list[LentMemory] = []
        while self._pieces and self.size_bytes > min(self.most_bytes, self.room_bytes()):
            excess.append(self._pieces.pop(0))
        await self.free(excess)
