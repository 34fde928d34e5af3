"""The interface of every path."""

from collections.abc import Mapping
from typing import Any, Protocol

from ..handle import StateHandle
from .tensor_kind import Tensors


class TransferPath(Protocol):
    """One way for states to travel. ``StateTransport`` makes it, selects it, sets the deadlines and logs.

    The two newest versions of a key are readable, each whole; older ones are stale. A cancelled call raises only after
    the last thread has stopped to read or write its tensors, and a cancelled ``put`` publishes nothing half written.
    """

    async def put(self, key: str, tensors: Tensors, *, version: int) -> StateHandle:
        """Publishes ``tensors`` (any shape, device or stride; dtypes of DTYPE_BYTES) as ``version``.

        Raises TypeError for a tensor that can't travel, ArenaSpace if there is too little memory, TransportClosed.
        """
        ...

    async def fetch(self, handle: StateHandle, into: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the tensors of ``handle``: ``into``, overwritten, or new ones.

        Raises StateMismatch before the first byte is written if ``into`` does not fit; StaleHandle, CorruptState,
        ForeignHandle, TransportClosed, after which the contents of ``into`` are undefined.
        """
        ...

    async def close(self) -> None:
        """Frees the memory and files of ``put``."""
        ...
