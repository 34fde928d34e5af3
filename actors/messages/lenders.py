"""Messages between the trainer and the lenders of memory for training states, one on each other host with slots.

Memory is lent for as long as the trainer is enlisted: the stream of ``enlist`` ends with the lender, and the memory
with the stream.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from ...core.actor import endpoint
from ...transport.errors import ArenaSpace
from ...transport.handle import LentMemory, StateHandle


@dataclass(frozen=True, slots=True)
class LenderLife:
    """One life of a lender. ``host``: the name of its host, for people."""

    host: str


class StateLender(Protocol):
    """Memory of one host for training states. A slot worker of the host writes it in place
    (``StateTransport.set``), and any process reads it by its handle."""

    @endpoint
    async def ping(self) -> None:
        """Answers."""

    @endpoint(raises=[ArenaSpace])
    async def lend(self, key: str, size_bytes: int, side: int | None = None) -> LentMemory:
        """See ``StateTransport.lend``."""

    @endpoint
    async def is_used(self, lent: LentMemory) -> bool:
        """See ``StateTransport.is_used``."""

    @endpoint
    async def take(self, handle: StateHandle, lent: LentMemory) -> StateHandle:
        """See ``StateTransport.take``: a copy of a state of another host, in ``lent``."""

    @endpoint
    async def take_back(self, lent: list[LentMemory]) -> None:
        """See ``StateTransport.take_back``."""

    @endpoint
    async def store_away(self, lent: LentMemory, file: str) -> None:
        """See ``StateTransport.store_away``. The folder is made at its first use."""

    @endpoint(raises=[ArenaSpace])
    async def bring_back(self, lent: LentMemory, file: str) -> LentMemory:
        """See ``StateTransport.bring_back``."""


class LenderApi(StateLender, Protocol):
    """A lender that the trainer reaches by messages."""

    @endpoint
    def enlist(self, encrypted: bool) -> AsyncGenerator[LenderLife]:
        """This life of the lender: one item. Until the stream ends, memory is lent to the caller. ``encrypted``: what
        other hosts read of it."""
