"""What every path must do."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ..handle import StateHandle

if TYPE_CHECKING:
    from torch import Tensor


class TransferPath(Protocol):
    """One way for states to travel. Made by ``StateTransport``, which selects, keeps deadlines and logs.

    The two newest versions of a key are readable, each whole; older ones are stale. A cancelled call raises
    only when no thread reads or writes its tensors any more, and a cancelled ``put`` publishes nothing half
    written.
    """

    async def put(self, key: str, tensors: "Mapping[str, Tensor]", *, version: int) -> StateHandle:
        """Publishes ``tensors`` (any shape, device or stride; dtypes of DTYPE_BYTES) as ``version``.

        Raises TypeError for a tensor that can't travel, ArenaSpace when memory is short, TransportClosed.
        """
        ...

    async def fetch(self, handle: StateHandle, into: "Mapping[str, Tensor] | None") -> "dict[str, Tensor]":
        """The tensors of ``handle``: ``into``, overwritten, or new ones.

        Raises StateMismatch before the first byte is written when ``into`` does not fit; StaleHandle,
        CorruptState, ForeignHandle, TransportClosed, after which ``into`` is undefined.
        """
        ...

    async def close(self) -> None:
        """Frees what ``put`` made."""
        ...
