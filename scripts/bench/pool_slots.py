"""Slot workers that only take time, for the pool of a trainer in virtual time: ``scripts/bench/run pool``.

A worker does each call of ``SlotApi`` in the seconds of ``PolicyCost``. A state moves in or out beside a computation
without slowing it, as a device's copy engine does.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from flexmarl.actors.messages import (
    GangPlace,
    HostState,
    LeasedBatch,
    MicroBatchTrained,
    Moved,
    SavedRest,
    SavedWeights,
    SlotApi,
    SlotLife,
    SlotStepped,
    StateBytes,
    StepStats,
    Suspended,
)
from flexmarl.actors.names import PolicyName, Step
from flexmarl.transport.handle import LentMemory, ShmSource, StateHandle

from .pool_load import Costs

_BYTES = 64
_SIZE = StateBytes(_BYTES, _BYTES, _BYTES, 2 * _BYTES, 3 * _BYTES, {}, {})
_STEPPED = SlotStepped(0, StepStats(0, 0, {}))


def _state_in(lent: LentMemory) -> StateHandle:
    source = ShmSource("shm", lent.node, lent.process, lent.block, 0)
    return StateHandle("timed", 0, 0, 0, (), (source,))


def timed_batch(seconds: float) -> LeasedBatch:
    """A micro-batch whose computation takes ``seconds``."""
    return LeasedBatch(0, {"seconds": [seconds]})


class TimedSlot(SlotApi):
    """Stands for a worker and for the reference to it. ``lost_s``: seconds in which a state moved here and nothing was
    computed."""

    def __init__(self, name: str, costs: Costs) -> None:
        self.name = name
        self.lost_s = 0.0
        self._costs = costs
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._moving = self._computing = 0
        self._prefetched: set[PolicyName] = set()

    def within(self, timeout_s: float) -> "TimedSlot":
        """See ``ActorRef.within``."""
        return self

    async def enlist(self) -> AsyncGenerator[SlotLife]:
        yield SlotLife(self.name, 1, "", "host")
        await asyncio.Event().wait()

    # ------------------------------------------------------------------ states

    async def enter(self, life: str, policy: PolicyName, rank: int, over_hosts: bool) -> str:
        return ""  # part of ``connect_s``

    async def build(self, life: str, policy: PolicyName, place: GangPlace) -> None:
        """Takes no time: the run has not begun."""

    async def prefetch(self, life: str, policy: PolicyName, state: HostState) -> Moved:
        self._prefetched.add(policy)
        return await self._move(self._costs[policy].load_s)

    async def resume(self, life: str, policy: PolicyName, place: GangPlace, state: HostState) -> Moved:
        cost = self._costs[policy]
        load_s = 0.0 if policy in self._prefetched else cost.load_s
        self._prefetched.discard(policy)
        return await self._move(load_s + cost.connect_s)

    async def reshard(
        self, life: str, policy: PolicyName, place: GangPlace, ranks: list[tuple[HostState, StateBytes]]
    ) -> Moved:
        raise NotImplementedError("the policies have fixed numbers of ranks")

    async def state_bytes(self, life: str, policy: PolicyName) -> StateBytes:
        return _SIZE

    async def set_weights(self, life: str, policy: PolicyName, weights: LentMemory) -> SavedWeights:
        return SavedWeights(_state_in(weights))  # part of ``step_s``

    async def set_rest(self, life: str, policy: PolicyName, rest: LentMemory, live: list[str]) -> SavedRest:
        await self._move(self._costs[policy].base_s)
        return SavedRest(_state_in(rest), {})

    async def suspend(self, life: str, policy: PolicyName, step: LentMemory) -> Suspended:
        return Suspended(_state_in(step), {}, await self._move(self._costs[policy].save_s))

    async def forget_copies(self, life: str, policy: PolicyName) -> None:
        raise NotImplementedError("the slots are on the trainer's host")

    async def drop(self, life: str, policy: PolicyName) -> None:
        self._prefetched.discard(policy)

    # ------------------------------------------------------------------ computations

    async def accumulate(self, life: str, policy: PolicyName, leased: LeasedBatch) -> MicroBatchTrained:
        (seconds,) = leased.columns["seconds"]
        await self._compute(seconds)
        return MicroBatchTrained(1, 1, {}, 1, seconds)

    async def optimizer_step(self, life: str, policy: PolicyName, step: Step) -> SlotStepped:
        await self._compute(self._costs[policy].step_s)
        return _STEPPED

    async def sft(self, life: str, policy: PolicyName, first_batch: int, count: int) -> float:
        raise NotImplementedError("a step has no supervised training")

    async def end_sft(self, life: str, policy: PolicyName) -> None:
        raise NotImplementedError("a step has no supervised training")

    async def save(self, life: str, policy: PolicyName, folder: str) -> None:
        raise NotImplementedError("a step has no checkpoint")

    # ------------------------------------------------------------------ time

    async def _move(self, seconds: float) -> Moved:
        self._changes(moving=1)
        await asyncio.sleep(seconds)
        self._changes(moving=-1)
        return Moved(_BYTES, "timed")

    async def _compute(self, seconds: float) -> None:
        self._changes(computing=1)
        await asyncio.sleep(seconds)
        self._changes(computing=-1)

    def _changes(self, *, moving: int = 0, computing: int = 0) -> None:
        now = self._loop.time()
        if self._moving and not self._computing:
            self.lost_s += now - self._since_s
        self._since_s = now
        self._moving += moving
        self._computing += computing


class Unheard:
    """Stands for the references to the console and the supervisor: events are dropped, and no worker is lost."""

    name = "unheard"

    def within(self, timeout_s: float) -> "Unheard":
        """See ``ActorRef.within``."""
        return self

    async def locate_node(self, name: str) -> str:
        """See ``Supervisor.locate_node``: all slots are on this host."""
        return ""

    async def tell(self, endpoint: str, *arguments: Any, timeout_s: float) -> None:
        """See ``ActorRef.tell``."""
