"""The memory of the trainer's process for the training states of a shared pool: it outlives the slot workers.

A state lies here once. Per policy, with its bytes for a parameter in bfloat16 over float32 (of one rank in float32:
weights 2 x 4, rest 8, step 4):

    weights   2 x 2    two pieces, written in turn: the two newest versions, as they are published
    rest          12   one piece: the base part that the last optimizer step left
    step           4   one piece from a suspension in mid-step to the end of that step

    optimizer step     the other piece --> the newer weights       published; the state is the older one, whole
    beside the next    a spare piece ----> the newer rest          the same
    all ranks' newer rests are whole       the state is the newer; the older rest's piece and the step's are spare
    suspension         a spare piece ----> the step part
    a slot is lost     the state is the rest, its step part is forgotten; a newer rest that is not whole is written
                       again, to the same piece

Spare pieces are those of all policies together (``spare_memory.py``), and states are copied one after the other
(``state_moves.py``): the peak is once the states of all policies, and once the rest of the largest.

Under pressure the rest and the step part of a suspended policy go to a file, and come back before the policy is
resumed. So a slot worker that dies at any moment leaves either the whole old or the whole new base part.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ....core.telemetry import get_logger
from ....transport.errors import ArenaSpace
from ....transport.handle import LentMemory, StateHandle
from ....transport.state import StateTransport
from ...messages import (
    BaseState,
    HostState,
    LikelyTokens,
    SavedRest,
    SavedWeights,
    StateBytes,
    Suspended,
)
from ...names import PolicyName
from .spare_memory import SpareMemory

Pair = tuple[LentMemory, LentMemory]
TRANSFER_TIMEOUT_S: Final = 3600.0
"""Catches a hang, not slowness: a large state takes long."""
log = get_logger(__name__)


class RankMemory:
    """The memory of one rank of a policy. ``state``: the whole state in it; None before the first. ``published``: the
    newest weights, perhaps newer than the state, with their ``probe``."""

    def __init__(self, transport: StateTransport, spare: SpareMemory, key: str, needed: StateBytes) -> None:
        """``key``: names the policy and the rank. ``needed``: bytes of the parts."""
        self.state: HostState | None = None
        self.published: StateHandle | None = None
        self.probe: tuple[LikelyTokens, ...] = ()
        self.needed = needed
        self._transport, self._spare = transport, spare
        self._key = key
        self._weights: Pair | None = None
        self._rest: LentMemory | None = None
        self._newer: LentMemory | None = None
        self._step: LentMemory | None = None
        self._file: Path | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes in memory that can be stored away."""
        return 0 if self._file is not None else sum(piece.size_bytes for piece in self._pieces())

    async def store_away(self, folder: Path) -> None:
        """Moves the rest and the step part to a file in ``folder``. Raises OSError: the state stays in memory then."""
        file = folder / f"{self._key}.state"
        await self._transport.store_away(self._pieces(), file)
        self._file = file

    async def bring_back(self) -> bool:
        """The reverse; True if the state was on the disk. Raises OSError, ArenaSpace: it stays there then."""
        if self._file is None or self.state is None:
            return False
        old = self._pieces()
        new = await self._transport.bring_back(old, self._file)
        base, step = self.state.base, self.state.step
        self._file, self._rest = None, new[0]
        base = replace(base, rest=base.rest.moved(old[0], new[0]))
        if step is not None:
            self._step = new[1]
            step = step.moved(old[1], new[1])
        self.state = HostState(base, step, self.state.data)
        return True

    def _pieces(self) -> list[LentMemory]:
        """Those of the rest and of the step part, if there is one."""
        step = None if self.state is None or self.state.step is None else self._step
        return [piece for piece in (self._rest, step) if piece is not None]

    async def for_weights(self) -> LentMemory:
        """Memory for the weights of a base part, beside those of the present one. Raises ArenaSpace."""
        if self._weights is None:
            key, size_bytes = f"{self._key}-weights", self.needed.weights
            first = await self._transport.lend(key, size_bytes)
            try:
                self._weights = first, await self._transport.lend(key, size_bytes)
            except ArenaSpace:
                self._transport.take_back([first])
                raise
        first, second = self._weights
        return second if self.state is not None and self.state.base.weights.lies_in(first) else first

    async def for_rest(self) -> LentMemory:
        """Memory for the rest of a base part, beside that of the present one; the step part before it is gone. Raises
        ArenaSpace."""
        self.step_was_lost()
        # Kept if the slot is lost before the rest is whole: its worker may write there until its process is dead.
        if self._newer is None:
            self._newer = await self._spare.take(f"{self._key}-rest", self.needed.rest)
        return self._newer

    async def for_step(self) -> LentMemory:
        """Memory for the step part, beside the present base part; an earlier step part is gone. Raises ArenaSpace."""
        assert self.state is not None, "a base part comes first"
        if self._step is None:
            self._step = await self._spare.take(f"{self._key}-step", self.needed.step)
        return self._step

    def continue_from(self, first: "RankMemory", rest: StateHandle) -> None:
        """The state is the base part ``rest`` of a policy that had other ranks before; ``first``: the first of those,
        which has the published weights."""
        assert first.state is not None
        base = replace(first.state.base, weights_are_live=False, rest=rest)
        self.published, self.probe = first.published, first.probe
        self._set_state(base)

    def take_weights_of(self, other: "RankMemory") -> None:
        """The memory of its published weights belongs to this one from now on: they stay readable."""
        self._weights, other._weights = other._weights, None

    def free(self) -> None:
        """Frees the memory: no handle may lie in it any more."""
        # Not for another state: ranks of another number have other sizes, and a slot may still write to it.
        pieces = [*(self._weights or ()), self._rest, self._newer, self._step]
        self._transport.take_back([piece for piece in pieces if piece is not None])
        self._weights = self._rest = self._newer = self._step = None

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
        return await self._transport.take(handle, lent, TRANSFER_TIMEOUT_S)

    def weights_were_set(self, saved: SavedWeights) -> None:
        """From now on these are published; the state is as before."""
        self.published, self.probe = saved.weights, saved.probe

    def rest_was_set(self, saved: SavedRest) -> None:
        """From now on this and the published weights are the state; the rest before, and the step part, are gone."""
        assert self.published is not None, "weights are set before the rest"
        self._set_state(BaseState(self.published, bool(self.needed.live), saved.rest, saved.data))

    def _set_state(self, base: BaseState) -> None:
        self.state = HostState(base, None, base.data)
        for piece in (self._rest, self._step):
            if piece is not None:
                self._spare.give_back(piece)
        self._rest, self._newer, self._step = self._newer, None, None

    def was_suspended(self, step: Suspended) -> None:
        """From now on the step part belongs to the state."""
        assert self.state is not None
        self.state = HostState(self.state.base, step.step, step.data)

    def step_was_lost(self) -> None:
        """Only the base part is left."""
        if self.state is not None:
            self.state = HostState(self.state.base, None, self.state.base.data)


class HostMemory:
    """The memory of all policies, and its limit."""

    def __init__(
        self,
        transport: StateTransport,
        policies: Sequence[PolicyName],
        limit_bytes: float,
        folder: Path,
    ) -> None:
        """``limit_bytes``: of states of policies without slots, but for their published weights, and of spare pieces,
        which are freed before a state is stored away. ``folder``: on a disk, for the other states; made at its first
        use."""
        self._transport, self._spare = transport, SpareMemory(transport, self._room_bytes)
        self._of: dict[PolicyName, list[RankMemory]] = {policy: [] for policy in policies}
        self._limit_bytes, self._folder = limit_bytes, folder
        self._out: dict[PolicyName, None] = {}
        """Policies without slots, the one suspended first first."""
        self._relieving = asyncio.Lock()
        self._moving = {policy: asyncio.Lock() for policy in policies}

    def __getitem__(self, policy: PolicyName) -> list[RankMemory]:
        """The memory of each of its ranks."""
        return self._of[policy]

    def was_built(self, policy: PolicyName, needed: Sequence[StateBytes]) -> None:
        """The policy has these ranks, whose memory is allocated at its first use."""
        for old in self._of[policy]:  # a slot was lost before the first state was whole
            old.free()
        self._of[policy] = [
            RankMemory(self._transport, self._spare, f"{policy}-{rank}", size)
            for rank, size in enumerate(needed)
        ]
        # Each that is taken in a swap is there, once it was needed for the first time.
        needs = [[rank.needed for rank in ranks] for ranks in self._of.values()]
        largest_rest = max(sum(size.rest for size in sizes) for sizes in needs)
        self._spare.most_bytes = largest_rest + sum(size.step for sizes in needs for size in sizes)

    def other_ranks(self, policy: PolicyName, needed: Sequence[StateBytes]) -> list[RankMemory]:
        """Memory for another number of ranks, beside the present one. Its base part has all weights in ``rest``."""
        return [
            RankMemory(self._transport, self._spare, f"{policy}-{rank}", replace(size, rest=size.base))
            for rank, size in enumerate(needed)
        ]

    def was_resharded(
        self, policy: PolicyName, ranks: list[RankMemory], rests: Sequence[StateHandle]
    ) -> None:
        """The state of the policy is in ``ranks`` from now on, in ``rests``; the memory of those before is freed."""
        before, self._of[policy] = self._of[policy], ranks
        for rank, rest in zip(ranks, rests, strict=True):
            rank.continue_from(before[0], rest)
        ranks[0].take_weights_of(before[0])
        for old in before:
            old.free()

    def states(self, policy: PolicyName) -> list[HostState] | None:
        """The whole state of each rank; None before the first."""
        states = [rank.state for rank in self._of[policy] if rank.state is not None]
        return states if states and len(states) == len(self._of[policy]) else None

    def is_in(self, policy: PolicyName) -> None:
        """The policy is about to get slots: its state stays in memory."""
        self._out.pop(policy, None)

    async def bring_back(self, policy: PolicyName) -> bool:
        """Has the policy's state in memory; True if it was on the disk. Raises OSError, ArenaSpace."""
        async with self._moving[policy]:
            return any([await rank.bring_back() for rank in self._of[policy]])

    async def is_out(self, policy: PolicyName) -> None:
        """The policy has no slots any more. States beyond the limit are stored away, the one suspended first first.

        If the disk has no room, the state stays in memory, and a warning is logged.
        """
        self._out[policy] = None
        async with self._relieving:
            self._spare.free_excess()
            for other in list(self._out):
                if self._out_bytes() <= self._limit_bytes:
                    return
                async with self._moving[other]:
                    if other in self._out:  # else it is about to get slots
                        await self._store_away(other)

    async def _store_away(self, policy: PolicyName) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for rank in self._of[policy]:
                if rank.host_bytes:
                    await rank.store_away(self._folder)
        except OSError as error:
            log.warning(
                "no room on the disk for a suspended state, which stays in memory",
                policy=policy,
                size_bytes=sum(rank.host_bytes for rank in self._of[policy]),
                folder=str(self._folder),
                error=str(error),
            )

    def _room_bytes(self) -> float:
        """For spare pieces."""
        return self._limit_bytes - self._out_bytes()

    def _out_bytes(self) -> int:
        return sum(rank.host_bytes for policy in self._out for rank in self._of[policy])
