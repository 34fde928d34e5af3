"""The memory of the trainer's process for the training states of a shared pool: it outlives the slot workers.

    weights   two pieces, written in turn: the two newest versions, as they are published
    rest      two pieces, written in turn: the base part that the last optimizer step left lies in one. The other takes
              the step part of a suspended policy, which is read before the next base part is written there

Under pressure the second pair of a suspended policy goes to a file, and comes back before the policy is resumed. So a
slot worker that dies at any moment leaves either the whole old or the whole new base part.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ....core.telemetry import get_logger
from ....transport.handle import LentMemory, StateHandle
from ....transport.state import StateTransport
from ...messages import BaseState, HostState, StateBytes, Suspended
from ...names import PolicyName

Pair = tuple[LentMemory, LentMemory]
TRANSFER_TIMEOUT_S: Final = 3600.0
"""Catches a hang, not slowness: a large state takes long."""
log = get_logger(__name__)


class RankMemory:
    """The memory of one rank of a policy. ``state``: the whole state in it; None before the first."""

    def __init__(self, transport: StateTransport, key: str, needed: StateBytes) -> None:
        """``key``: names the policy and the rank. ``needed``: bytes of the parts."""
        self.state: HostState | None = None
        self.needed = needed
        self._transport = transport
        self._key = key
        self._pairs: dict[str, Pair] = {}
        self._file: Path | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes in memory that can be stored away."""
        pair = self._pairs.get("rest")
        return 0 if pair is None or self._file is not None else sum(piece.size_bytes for piece in pair)

    async def store_away(self, folder: Path) -> None:
        """Moves the rest and the step part to a file in ``folder``. Raises OSError: the state stays in memory then."""
        assert self.state is not None, "a policy without a state has no memory"
        file = folder / f"{self._key}.state"
        await self._transport.store_away(self._pairs["rest"], self._pieces_in_use(self.state), file)
        self._file = file

    async def bring_back(self) -> bool:
        """The reverse; True if the state was on the disk. Raises OSError, ArenaSpace: it stays there then."""
        if self._file is None or self.state is None:
            return False
        old = self._pairs["rest"]
        new = await self._transport.bring_back(old, self._pieces_in_use(self.state), self._file)
        self._pairs["rest"], self._file = new, None
        base, step = self.state.base, self.state.step
        for source, target in zip(old, new, strict=True):
            base = replace(base, rest=base.rest.moved(source, target))
            step = None if step is None else step.moved(source, target)
        self.state = HostState(base, step, self.state.data)
        return True

    def _pieces_in_use(self, state: HostState) -> list[LentMemory]:
        """The pieces of the second pair that hold something."""
        handles = [state.base.rest, *([] if state.step is None else [state.step])]
        return [piece for piece in self._pairs["rest"] if any(handle.lies_in(piece) for handle in handles)]

    async def for_rest(self) -> LentMemory:
        """Memory for the rest of the first base part."""
        return (await self._pair("rest", max(self.needed.rest, self.needed.step)))[0]

    def continue_from(self, first: "RankMemory", rest: StateHandle) -> None:
        """The state is the base part ``rest`` of a policy that had other ranks before; ``first``: the first of those,
        which has the published weights."""
        assert first.state is not None
        base = replace(first.state.base, weights_are_live=False, rest=rest)
        self.state = HostState(base, None, base.data)

    def take_weights_of(self, other: "RankMemory") -> None:
        """The memory of its published weights belongs to this one from now on: they stay readable."""
        self._pairs["weights"] = other._pairs.pop("weights")

    def free(self) -> None:
        """Gives the memory back: no handle may lie in it any more."""
        for pair in self._pairs.values():
            self._transport.take_back(pair)
        self._pairs.clear()

    async def for_base(self) -> tuple[LentMemory, LentMemory]:
        """Memory for the weights and the rest of a base part. The present state stays whole. Raises ArenaSpace."""
        weights = await self._pair("weights", self.needed.weights)
        rest = await self._pair("rest", max(self.needed.rest, self.needed.step))
        if self.state is None:
            return weights[0], rest[0]
        base = self.state.base
        return _other(weights, base.weights), _other(rest, base.rest)

    def for_step(self) -> LentMemory:
        """Memory for the step part, beside the present base part."""
        assert self.state is not None, "a base part comes first"
        return _other(self._pairs["rest"], self.state.base.rest)

    async def take_base(self, base: BaseState, lent: tuple[LentMemory, LentMemory]) -> BaseState:
        """The base part that was set with ``lent``, now in this memory."""
        weights, rest = lent
        return replace(
            base, weights=await self.take(base.weights, weights), rest=await self.take(base.rest, rest)
        )

    async def take_step(self, step: Suspended, lent: LentMemory) -> Suspended:
        """The step part that was set with ``lent``, now in this memory."""
        return step if step.step is None else replace(step, step=await self.take(step.step, lent))

    async def take(self, handle: StateHandle, lent: LentMemory) -> StateHandle:
        """A state that was set with ``lent``, now in this memory: it comes over the network if its slot is on another
        node. Raises as ``StateTransport.take`` does."""
        return await self._transport.take(handle, lent, TRANSFER_TIMEOUT_S)

    def base_was_set(self, base: BaseState) -> None:
        """From now on this is the state."""
        self.state = HostState(base, None, base.data)

    def was_suspended(self, step: Suspended) -> None:
        """From now on the step part belongs to the state."""
        assert self.state is not None
        self.state = HostState(self.state.base, step.step, step.data)

    def step_was_lost(self) -> None:
        """Only the base part is left."""
        if self.state is not None:
            self.state = HostState(self.state.base, None, self.state.base.data)

    async def _pair(self, part: str, size_bytes: int) -> Pair:
        if part not in self._pairs:
            self._pairs[part] = await self._transport.lend(f"{self._key}-{part}", size_bytes)
        return self._pairs[part]


def _other(pair: Pair, used: StateHandle) -> LentMemory:
    """The piece of ``pair`` that ``used`` does not lie in."""
    first, second = pair
    return second if used.lies_in(first) else first


class HostMemory:
    """The memory of all policies, and its limit."""

    def __init__(
        self,
        transport: StateTransport,
        policies: Sequence[PolicyName],
        limit_bytes: float,
        folder: Path,
    ) -> None:
        """``limit_bytes``: of states of policies without slots, but for their published weights. ``folder``: on a disk,
        for the others; made at its first use."""
        self._transport = transport
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
        self._of[policy] = [
            RankMemory(self._transport, f"{policy}-{rank}", size) for rank, size in enumerate(needed)
        ]

    def other_ranks(self, policy: PolicyName, needed: Sequence[StateBytes]) -> list[RankMemory]:
        """Memory for another number of ranks, beside the present one. Its base part has all weights in ``rest``."""
        return [
            RankMemory(self._transport, f"{policy}-{rank}", replace(size, rest=size.base))
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

    def _out_bytes(self) -> int:
        return sum(rank.host_bytes for policy in self._out for rank in self._of[policy])
