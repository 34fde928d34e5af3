"""The interface of every path."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from .handle import PathName, Source, StateHandle, TensorSpec
from .tensors.tensor_kind import Tensors

S = TypeVar("S", bound=Source)


@dataclass(frozen=True, slots=True)
class Offer:
    """A state as one memory offers it. ``digest``: see ``StateHandle``; None if the memory has another check."""

    sources: tuple[Source, ...]
    tensors: tuple[TensorSpec, ...]
    size_bytes: int
    digest: int | None


def handle_of(key: str, version: int, offers: Sequence[Offer]) -> StateHandle:
    """The handle of one state that lies in several memories."""
    first = offers[0]
    digest = next((offer.digest for offer in offers if offer.digest is not None), None)
    sources = tuple(source for offer in offers for source in offer.sources)
    return StateHandle(key, version, first.size_bytes, digest, first.tensors, sources)


@dataclass(slots=True)
class Progress:
    """Words about a transfer under way, for the error after its deadline; empty if the path has nothing to say."""

    words: str = ""


@dataclass(frozen=True, slots=True)
class ReadRequest(Generic[S]):
    """The request of a Get to a path: ``tensors`` of ``handle`` (whole, or rows of them), from its ``source``."""

    handle: StateHandle
    source: S
    tensors: Sequence[TensorSpec]
    progress: Progress = field(default_factory=Progress, compare=False)

    @property
    def is_whole(self) -> bool:
        return self.tensors is self.handle.tensors

    @property
    def size_bytes(self) -> int:
        return self.handle.size_bytes if self.is_whole else sum(spec.size_bytes for spec in self.tensors)


class TransferPath(Protocol[S]):
    """One way for states to travel. ``StateTransport`` makes it, selects it, sets the deadlines and logs.

    The two newest versions of a key are readable, each whole; older ones are stale. A cancelled call raises only after
    the last thread has stopped to read or write its tensors, and a cancelled ``offer`` publishes nothing half written.
    """

    async def offer(self, key: str, tensors: Tensors, *, version: int, paths: Sequence[PathName]) -> Offer:
        """Publishes ``tensors`` (any shape, device or stride; dtypes of DTYPE_BYTES) as ``version``, with a source for
        each of ``paths``: host memory has two of them, and makes one copy for both.

        Raises TypeError for a tensor that can't travel, ArenaSpace if there is too little memory, TransportClosed.
        """
        ...

    async def fetch(self, request: ReadRequest[S], into: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the tensors: ``into``, overwritten, or new ones.

        Raises StateMismatch before the first byte is written if ``into`` does not fit; StaleHandle, CorruptState,
        ForeignHandle, TransportClosed, after which the contents of ``into`` are undefined.
        """
        ...

    async def drop(self, key: str) -> None:
        """Frees the memory of a key. Its handles become stale."""
        ...

    async def close(self) -> None:
        """Frees the memory and files of ``offer``."""
        ...


class Memory(TransferPath[S], Protocol[S]):
    """A path whose memory a reader may also use where it lies."""

    def view(self, request: ReadRequest[S], *, checked: bool) -> AbstractAsyncContextManager[dict[str, Any]]:
        """The tensors in place, for reading, as they are inside of the context. ``checked``: the bytes are compared
        with their digests. Raises as ``fetch``, when the context is entered."""
        ...
