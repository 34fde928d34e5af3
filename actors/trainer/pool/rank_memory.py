"""The memory of one rank of a policy for its training state, in pieces on one host or several (``host_memory.py``)."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final, Literal

from ....core.errors import ActorDead
from ....core.telemetry import get_logger
from ....transport.errors import ArenaSpace
from ....transport.handle import LentMemory, StateHandle
from ...messages import (
    BaseState,
    HostState,
    LikelyTokens,
    SavedRest,
    SavedWeights,
    StateBytes,
    Suspended,
)
from .lender import LENDER
from .state_hosts import StateHost

log = get_logger(__name__)
Pair = tuple[LentMemory, LentMemory]
Part = Literal["rest", "step"]
_PARTS: Final[tuple[Part, ...]] = ("rest", "step")


class Loss(Enum):
    """The consequence of a host's loss for a state. ``MOVED``: it is whole, by second copies."""

    NOTHING = 0
    MOVED = 1
    STEP = 2
    BASE = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory of a host that a part of a state lies in, or will."""

    host: StateHost
    lent: LentMemory


@dataclass(frozen=True, slots=True)
class Copy:
    """A second copy of a part of a state: ``handle`` names it in ``piece``."""

    piece: Piece
    handle: StateHandle


class RankMemory:
    """The memory of one rank of a policy. ``state``: the whole state in it; None before the first. ``published``: the
    newest weights, perhaps newer than the state, with their ``probe``."""

    def __init__(self, head: StateHost, key: str, needed: StateBytes) -> None:
        """``key``: names the policy and the rank. ``needed``: bytes of the parts."""
        self.state: HostState | None = None
        self.published: StateHandle | None = None
        self.probe: tuple[LikelyTokens, ...] = ()
        self.needed = needed
        self._head = head
        self._key = key
        self._weights: Pair | None = None
        self._newer: Piece | None = None
        self._parts: dict[Part, Piece] = {}
        """Memory of the rest, and of the step part, also if no state lies there now."""
        self._seconds: dict[Part, Copy] = {}
        self._files: dict[Part, Path] = {}
        self._lending = asyncio.Lock()
        """A gang that has lost a slot may still wait for memory of a slow host while the next one asks for its own: the
        one that has asked last gets what is noted here."""

    # ------------------------------------------------------------------ memory for the next state

    async def for_weights(self) -> LentMemory:
        """Memory for the weights of a base part, beside those of the present one. Raises ArenaSpace."""
        if self._weights is None:
            # On any side of the head: instances near all devices read them.
            key, size_bytes, spare = f"{self._key}-weights", self.needed.weights, self._head.spare
            first = await spare.lend(key, size_bytes)
            try:
                self._weights = first, await spare.lend(key, size_bytes)
            except ArenaSpace:
                await spare.free([first])
                raise
        first, second = self._weights
        return second if self.state is not None and self.state.base.weights.lies_in(first) else first

    async def for_rest(self, host: StateHost, side: int | None = None) -> LentMemory:
        """Memory of ``host``, on its ``side`` if there is some, for the rest of a base part, beside that of the present
        one; the step part before it is gone. Raises ArenaSpace, and ActorDead if the host is lost."""
        async with self._lending:
            self.step_was_lost()
            # Kept if the slot is lost before the rest is whole: its worker may write there until its process is dead.
            if self._newer is not None and self._newer.host is not host:
                self._newer.host.spare.give_back(self._newer.lent)
                self._newer = None
            if self._newer is None:
                lent = await host.spare.take(f"{self._key}-rest", self.needed.rest, side)
                self._newer = Piece(host, lent)
            return self._newer.lent

    async def for_step(self, host: StateHost, side: int | None = None) -> LentMemory:
        """The same for the step part, beside the present base part; an earlier step part is gone. Raises as
        ``for_rest``, and if the base part is lost."""
        async with self._lending:
            self.check_base()
            self._forget_second("step")
            piece = self._parts.get("step")
            is_near = piece is not None and piece.host is host and piece.lent.side == side
            # A second copy of the step part before may still be under way.
            if piece is not None and (not is_near or await host.lender.is_used(piece.lent)):
                # If its host was lost meanwhile, that of its second copy, or none.
                if (old := self._parts.pop("step", None)) is not None:
                    old.host.spare.give_back(old.lent)
                piece = None
            if piece is None:
                piece = Piece(host, await host.spare.take(f"{self._key}-step", self.needed.step, side))
                self._parts["step"] = piece
            return piece.lent

    def continue_from(self, first: "RankMemory", rest: StateHandle) -> None:
        """The state is the base part ``rest`` of a policy that had other ranks before; ``first``: the first of those,
        which has the published weights. Raises ActorDead if its base part was lost meanwhile."""
        base = replace(first.check_base().base, weights_are_live=False, rest=rest)
        self.published, self.probe = first.published, first.probe
        self._set_state(base)

    def take_weights_of(self, other: "RankMemory") -> None:
        """The memory of its published weights belongs to this one from now on: they stay readable."""
        self._weights, other._weights = other._weights, None

    async def free(self) -> None:
        """Frees the memory: no handle may lie in it any more."""
        # Not for another state: ranks of another number have other sizes, and a slot may still write to it.
        weights, self._weights = self._weights, None
        pieces = [piece for part, piece in self._parts.items() if part not in self._files]
        pieces += [copy.piece for copy in self._seconds.values()]
        if self._newer is not None:
            pieces.append(self._newer)
        self._newer = self.state = None  # a second copy of it may still be under way: it finds no state
        for by_part in (self._parts, self._seconds, self._files):
            by_part.clear()
        if weights is not None:
            await self._head.spare.free([*weights])
        for piece in pieces:
            if not piece.host.is_lost:
                await piece.host.spare.free([piece.lent])

    # ------------------------------------------------------------------ a state that was set

    async def take_weights(self, saved: SavedWeights, lent: LentMemory) -> SavedWeights:
        """The weights that were set with ``lent``, now in this memory."""
        return replace(saved, weights=await self.take(saved.weights, lent))

    async def take_rest(self, saved: SavedRest, lent: LentMemory) -> SavedRest:
        """The rest that was set with ``lent``, now in this memory."""
        return replace(saved, rest=await self.take(saved.rest, lent))

    async def take_step(self, step: Suspended, lent: LentMemory) -> Suspended:
        """The step part that was set with ``lent``, now in this memory."""
        return step if step.step is None else replace(step, step=await self.take(step.step, lent))

    async def take(self, handle: StateHandle, lent: LentMemory) -> StateHandle:
        """A state that was set with ``lent``, now in this memory: it comes over the network if its slot is on another
        node. Raises as ``StateTransport.take`` does."""
        if handle.lies_in(lent):
            return handle
        pieces = [piece for piece in (self._newer, *self._parts.values()) if piece is not None]
        host = next((piece.host for piece in pieces if piece.lent == lent), self._head)
        return await host.lender.take(handle, lent)

    def weights_were_set(self, saved: SavedWeights) -> None:
        """From now on these are published; the state is as before."""
        self.published, self.probe = saved.weights, saved.probe

    def rest_was_set(self, saved: SavedRest) -> None:
        """From now on this and the published weights are the state; the rest before, and the step part, are gone."""
        assert self.published is not None, "weights are set before the rest"
        self._set_state(BaseState(self.published, bool(self.needed.live), saved.rest, saved.data))

    def _set_state(self, base: BaseState) -> None:
        assert self._newer is not None, "the rest has just been set there"
        self.state = HostState(base, None, base.data)
        for part in _PARTS:
            self._forget_second(part)
            if (piece := self._parts.pop(part, None)) is not None:
                piece.host.spare.give_back(piece.lent)
        self._parts["rest"], self._newer = self._newer, None

    def was_suspended(self, step: Suspended) -> None:
        """From now on the step part belongs to the state. Raises ActorDead if the base part was lost meanwhile."""
        self.state = HostState(self.check_base().base, step.step, step.data)

    def check_base(self) -> HostState:
        """The state. Raises ActorDead if its base part was lost with a host: the slots of its gang may be on others."""
        if self.state is None:
            raise ActorDead(LENDER, "the base part of a state was lost with its host")
        return self.state

    def step_was_lost(self) -> None:
        """Only the base part is left."""
        self._forget_second("step")
        if self._files.pop("step", None) is not None:
            del self._parts["step"]
        if self.state is not None:
            self.state = HostState(self.state.base, None, self.state.base.data)

    # ------------------------------------------------------------------ the present state

    def handle(self, part: Part) -> StateHandle | None:
        """The handle of a part of the present state; None if it has none."""
        if self.state is None:
            return None
        return self.state.base.rest if part == "rest" else self.state.step

    def _replace(self, part: Part, handle: StateHandle) -> None:
        assert self.state is not None
        if part == "rest":
            base = replace(self.state.base, rest=handle)
            self.state = HostState(base, self.state.step, self.state.data)
        else:
            self.state = HostState(self.state.base, handle, self.state.data)

    def pieces(self) -> Iterator[tuple[Part, Piece]]:
        """Memory that the present state lies in, by part, without the parts on the disk."""
        for part in _PARTS:
            if self.handle(part) is not None and part not in self._files:
                yield part, self._parts[part]

    def hosts(self) -> list[StateHost]:
        """The host of each part of the present state, also if it is on the disk."""
        return [piece.host for part, piece in self._parts.items() if self.handle(part) is not None]

    def host_bytes(self, host: StateHost | None = None) -> int:
        """Bytes in memory of ``host``, or of all, that can be stored away."""
        pieces = (piece for _, piece in self.pieces() if host in (None, piece.host))
        return sum(piece.lent.size_bytes for piece in pieces)

    async def store_away(self, host: StateHost, folder: Path) -> None:
        """Moves the rest and the step part from the memory of ``host`` to files in ``folder``. Raises OSError, or
        RemoteError on another host: the part stays in memory then."""
        for part, piece in list(self.pieces()):
            if piece.host is host:
                file = folder / f"{self._key}-{part}.state"
                await host.lender.store_away(piece.lent, str(file))
                if self._parts.get(part) is not piece:
                    continue  # the host is lost, with the file: the part is in its second copy now, or gone
                host.spare.lent_bytes -= piece.lent.size_bytes
                self._files[part] = file

    async def bring_back(self) -> bool:
        """The reverse; True if a part was on the disk. Raises OSError, RemoteError, ArenaSpace: it stays there then.
        Raises ActorDead if the base part is lost meanwhile."""
        was_on_disk = bool(self._files)
        for part, file in list(self._files.items()):
            handle, old = self.handle(part), self._parts[part]
            assert handle is not None, "a state is stored away whole"
            new = await old.host.lender.bring_back(old.lent, str(file))
            if self._parts.get(part) is not old:
                self.check_base()
                continue  # the host is lost: the part is in its second copy now, or was the step part
            old.host.spare.lent_bytes += new.size_bytes
            del self._files[part]
            self._parts[part] = Piece(old.host, new)
            self._replace(part, handle.moved(old.lent, new))
        return was_on_disk

    # ------------------------------------------------------------------ second copies

    def missing(self) -> Iterator[tuple[Part, Piece, StateHandle]]:
        """Parts of the present state that would be lost with their host."""
        for part, piece in self.pieces():
            handle = self.handle(part)
            if not piece.host.is_head and part not in self._seconds and handle is not None:
                yield part, piece, handle

    async def copy_again(self, part: Part, piece: Piece, handle: StateHandle, host: StateHost) -> None:
        """Copies a part, ``handle`` in ``piece``, to the memory of ``host``. Raises ArenaSpace, and the errors of
        ``StateTransport.take``, also if the state has changed meanwhile: then there is no copy."""
        lent = await host.spare.take(f"{self._key}-{part}", piece.lent.size_bytes)
        try:
            copied = await host.lender.take(handle, lent)
        except BaseException:
            if not host.is_lost:  # not kept: it may still be written
                await asyncio.shield(host.spare.free([lent]))
            raise
        if self.handle(part) == handle and self._parts.get(part) == piece and not host.is_lost:
            self._seconds[part] = Copy(Piece(host, lent), copied)
            # From here on the loss of the first one's host is not that of the state.
            log.debug(
                "a state has a second copy", rank=self._key, part=part, version=handle.version, on=host.name
            )
        else:
            host.spare.give_back(lent)

    def _forget_second(self, part: Part) -> None:
        if (copy := self._seconds.pop(part, None)) is not None:
            copy.piece.host.spare.give_back(copy.piece.lent)

    def second_bytes(self, host: StateHost) -> int:
        """Bytes of second copies on ``host``."""
        pieces = (copy.piece for copy in self._seconds.values() if copy.piece.host is host)
        return sum(piece.lent.size_bytes for piece in pieces)

    def drop_seconds(self, host: StateHost) -> list[LentMemory]:
        """Has no second copies on ``host`` from now on; returns their memory."""
        dropped = {part: copy for part, copy in self._seconds.items() if copy.piece.host is host}
        for part in dropped:
            del self._seconds[part]
        return [copy.piece.lent for copy in dropped.values()]

    def host_lost(self, host: StateHost) -> Loss:
        """All that lay on ``host`` is gone."""
        self._seconds = {part: copy for part, copy in self._seconds.items() if copy.piece.host is not host}
        if self._newer is not None and self._newer.host is host:
            self._newer = None
        return max((self._part_lost(part, host) for part in _PARTS), key=lambda loss: loss.value)

    def _part_lost(self, part: Part, host: StateHost) -> Loss:
        if (piece := self._parts.get(part)) is None or piece.host is not host:
            return Loss.NOTHING
        del self._parts[part]
        self._files.pop(part, None)
        if self.handle(part) is None:
            return Loss.NOTHING
        if (copy := self._seconds.pop(part, None)) is not None:
            self._parts[part] = copy.piece
            self._replace(part, copy.handle)
            return Loss.MOVED
        if part == "rest":
            self.state = None
            return Loss.BASE
        self.step_was_lost()
        return Loss.STEP
