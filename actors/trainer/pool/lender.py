"""Lenders of memory for training states: the trainer's own process lends that of its host, and on each other host an
actor of the node's process does.

    the node joins                  HostLender           waits in the node's process (``serve_run``)
    a slot there enlists            HostLender.enlist    opens the transport, until the trainer leaves the stream
    a gang's state is copied        Lending.lend         memory, which the slot worker sets
    a slot worker is killed         -                    the memory is the lender's: the state in it stays whole
    the trainer or the run ends     -                    the stream ends, and the memory is freed
    the node's process ends         -                    so do the slots of the host: the states there are lost

The node's process, not one more beside it: it starts the slot workers, outlives each of them, and is the host as its
head knows it. So memory and slots of a host are lost together, and no second supervision has to decide which was first.
"""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from ....core.actor import Actor, endpoint
from ....transport.handle import LentMemory, StateHandle
from ....transport.remote.bulk import Bulk
from ....transport.state import StateTransport
from ...messages import LenderApi, LenderLife, StateLender

LENDER: Final = "memory"
"""The name of a node's lender."""

TRANSFER_TIMEOUT_S: Final = 3600.0
"""Catches a hang, not slowness: a large state takes long."""


class Lending(StateLender):
    """The memory of the host of ``transport``."""

    def __init__(self, transport: StateTransport) -> None:
        self._transport = transport

    @endpoint
    async def ping(self) -> None:
        pass

    @endpoint
    async def lend(self, key: str, size_bytes: int, side: int | None = None) -> LentMemory:
        return await self._transport.lend(key, size_bytes, side)

    @endpoint
    async def is_used(self, lent: LentMemory) -> bool:
        return self._transport.is_used(lent)

    @endpoint
    async def take(self, handle: StateHandle, lent: LentMemory) -> StateHandle:
        return await self._transport.take(handle, lent, TRANSFER_TIMEOUT_S)

    @endpoint
    async def take_back(self, lent: list[LentMemory]) -> None:
        self._transport.take_back(lent)

    @endpoint
    async def store_away(self, lent: LentMemory, file: str) -> None:
        Path(file).parent.mkdir(mode=0o700, exist_ok=True)
        await self._transport.store_away([lent], Path(file))

    @endpoint
    async def bring_back(self, lent: LentMemory, file: str) -> LentMemory:
        (piece,) = await self._transport.bring_back([lent], Path(file))
        return piece


class HostLender(Lending, Actor, LenderApi):
    """The lender in a node's process. ``host``: the name of its host. ``directory``: of the slot workers' systems."""

    def __init__(self, host: str, directory: Path) -> None:
        self._host, self._directory = host, directory
        self._enlisted = asyncio.Lock()

    async def on_stop(self) -> None:
        if self._enlisted.locked():
            await self._transport.close()

    @endpoint
    async def enlist(self, encrypted: bool) -> AsyncGenerator[LenderLife]:
        # One after the other: the loss of an earlier trainer may not have been noticed yet.
        async with (
            self._enlisted,
            StateTransport(
                self._directory, bulk=Bulk.of(self.system, encrypted=encrypted)
            ) as self._transport,
        ):
            yield LenderLife(self._host)
            await asyncio.Event().wait()
