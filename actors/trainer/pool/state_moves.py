"""The ways of training states between the slots and the memory of their hosts, and their events."""

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from ....core.base.task_groups import first_error
from ....core.base.texts import text_of
from ....core.errors import ActorDead, FlexmarlError
from ....core.telemetry import get_logger
from ....core.waits import OpenWaits, Wait
from ....transport.errors import ArenaSpace, TransportError
from ....transport.handle import LentMemory
from ...errors import FetchNotStopped, StateTooLarge
from ...messages import WORK_TIMEOUT_S, HostState, Moved, SlotApi, StateBytes, Suspended
from ...names import PolicyName
from ...run_events import PolicyResumed, PolicySuspended, RunEvent
from ..trainer_setup import SharedPoolSetup
from .host_memory import HostMemory
from .lender import LENDER
from .pool_record import PoolRecord
from .pool_slots import HostedGang, PoolSlots, SlotLost
from .rank_memory import RankMemory
from .state_hosts import StateHost

# A call that computes with a lost rank fails at once, unless the gang has not met yet.
TORN_TIMEOUT_S: Final = 5.0
# A copy is stopped between two of its pieces, and a disk or a network may be slow with one.
_STOP_TIMEOUT_S: Final = 120.0
_NOTHING: Final = Moved(0, "none")

T = TypeVar("T")
log = get_logger(__name__)
Lend = Callable[[RankMemory, StateHost, int | None], Awaitable[LentMemory]]
"""Memory of a rank on the host of its slot, on the side of its devices."""
StateCall = Callable[[SlotApi, str, int, HostState], Awaitable[Moved]]
"""A ``SlotCall`` that is given the rank's state."""


class StateMoves:
    """``memory``: of all hosts. ``records``: of all policies. ``fewest_parts``: of each policy's state. ``hosts``: is
    the gang still the policy's? None of its slots was lost. One class: all moves share the turns, the fetches and the
    waits."""

    def __init__(
        self,
        pool: SharedPoolSetup,
        slots: PoolSlots,
        fewest_parts: Mapping[PolicyName, int],
        hosts: Callable[[PolicyName, HostedGang], bool],
        clock: Callable[[], float],
    ) -> None:
        limit_gib = pool.config.host_memory_gib
        limit_bytes = math.inf if limit_gib is None else limit_gib * 2**30
        self.memory = HostMemory(slots.hosts, [*fewest_parts], limit_bytes, pool.spill_dir)
        self.records = {policy: PoolRecord() for policy in fewest_parts}
        self._fewest_parts = fewest_parts
        self._clock = clock
        self._pool, self._slots, self._hosts = pool, slots, hosts
        self._news: asyncio.Queue[RunEvent] = asyncio.Queue()
        self._waits = OpenWaits()
        self._copying: dict[StateHost, asyncio.Lock] = {}
        self._turns: list[tuple[PolicyName, set[StateHost]]] = []
        """Policies whose state is being copied, and those behind them, with the hosts of their memory."""
        self._copying_again = {policy: asyncio.Lock() for policy in fewest_parts}
        self._taking: dict[PolicyName, asyncio.Task[Any]] = {}
        """States that are being fetched into the host's memory."""

    def clear_disk(self) -> None:
        """Removes states that a run that was killed has left, or this one."""
        shutil.rmtree(self._pool.spill_dir, ignore_errors=True)

    # ------------------------------------------------------------------ to the slots

    async def prefetch(self, policy: PolicyName, gang: HostedGang, reason: str) -> None:
        """Has the state on the gang's slots, as far as that can be before its ranks meet. Raises SlotLost, and the
        errors of the transport."""
        if len(gang.slots) == 1 and len(self.memory[policy]) <= 1:
            await self.load(policy, gang, reason)
        elif self._is_divided_alike(policy, gang):  # else Bind builds it, or divides it differently
            await self._copy_ahead(policy, gang, reason)

    async def _copy_ahead(self, policy: PolicyName, gang: HostedGang, reason: str) -> None:
        """A process can be in one gang at a time: the processes of this one meet when it is bound."""
        await self._resume(
            policy, gang, reason, lambda slot, life, rank, state: slot.prefetch(life, policy, state)
        )
        gang.is_prefetched = True

    async def load(self, policy: PolicyName, gang: HostedGang, reason: str) -> None:
        """Has the gang ready to compute, built if it is the first time."""
        if gang.is_loaded:
            return
        await self._wait_stopped(policy)

        def resume(slot: SlotApi, life: str, rank: int, state: HostState) -> Awaitable[Moved]:
            return slot.resume(life, policy, gang.places[rank], state)

        states = self.memory.states(policy)
        is_divided_alike = self._is_divided_alike(policy, gang)
        if is_divided_alike and len(gang.slots) > 1 and not gang.is_prefetched:
            await self._copy_ahead(policy, gang, reason)
        await self._slots.enter(policy, gang)
        if states is None:
            await self._build(policy, gang)
        elif not is_divided_alike:
            await self._reshard(policy, gang, reason)
        elif gang.is_prefetched:
            states = self._states(policy)
            await self._slots.at(
                gang, lambda slot, life, rank: resume(slot, life, rank, states[rank % gang.parts])
            )
        else:
            await self._resume(policy, gang, reason, resume)
        gang.is_loaded = True

    def _is_divided_alike(self, policy: PolicyName, gang: HostedGang) -> bool:
        """The ranks of a replica have the parts in which the state lies in the host's memory."""
        states = self.memory.states(policy)
        if states is None or len(states) != gang.parts:
            return False
        # The ranks of a gang have their weights in the rest.
        return len(gang.slots) == 1 or not states[0].base.weights_are_live

    async def _wait_stopped(self, policy: PolicyName) -> None:
        """Returns when a fetch of the policy that was stopped has ended: it writes where the next state will be set.
        Raises FetchNotStopped."""
        if (fetching := self._taking.get(policy)) is None:
            return
        with self._waits.open(f"the end of a fetch of {policy} from a slot that was lost"):
            done, _ = await asyncio.wait([fetching], timeout=_STOP_TIMEOUT_S)
        if not done:
            raise FetchNotStopped(policy, _STOP_TIMEOUT_S)
        if self._taking.get(policy) is fetching:  # a gang that was lost meanwhile may have waited for it too
            del self._taking[policy]

    def waits(self) -> list[Wait]:
        """See ``Actor.waits``: the moves that wait for others to end."""
        return [*self._waits.current(), *self._slots.hosts.waits()]

    async def _resume(self, policy: PolicyName, gang: HostedGang, reason: str, call: StateCall) -> None:
        """Has each rank's state copied to its slot by ``call``, and reports it."""
        began = self._clock()
        async with self._needs(gang, self.memory.hosts_of(policy)):
            was_on_disk = await self.memory.bring_back(policy)
            states = self._states(policy)
            moved = await self._slots.at(
                gang, lambda slot, life, rank: call(slot, life, rank, states[rank % gang.parts])
            )
        if was_on_disk:
            moved = [replace(copy, path=f"disk, {copy.path}") for copy in moved]
        self._report_move(PolicyResumed, policy, gang, reason, moved, self._clock() - began)

    def _states(self, policy: PolicyName) -> list[HostState]:
        """The whole state of each rank. Raises ActorDead if it was lost with a host."""
        if (states := self.memory.states(policy)) is None:
            raise ActorDead(LENDER, f"the state of policy {policy} is lost with its host")
        return states

    @asynccontextmanager
    async def _needs(self, gang: HostedGang, hosts: Sequence[StateHost]) -> AsyncIterator[None]:
        """The gang's slots read or write memory of ``hosts``. Raises SlotLost if that fails because one of them is
        lost: then the policy is bound again, with the state that is left."""
        try:
            yield
        except FlexmarlError as error:
            for host in hosts:
                await self._slots.hosts.check(host)
                if host.is_lost:
                    reason = f"the memory of host {host.name}, where its state was, is lost"
                    raise SlotLost(gang.slots[0], gang.lives[0], reason) from error
            raise

    def _hosts_of(self, gang: HostedGang) -> list[StateHost]:
        """The hosts in whose memory the gang's state is set: those of its first replica."""
        return list(dict.fromkeys(map(self._slots.host_of, gang.slots[: gang.parts])))

    async def _lend(self, gang: HostedGang, memory: Sequence[RankMemory], lend: Lend) -> list[LentMemory]:
        """Memory for each rank, on the host of its slot, near its devices. Raises ArenaSpace, and ActorDead if such a
        host is lost."""
        lent = []
        for rank, slot in zip(memory, gang.slots[: gang.parts], strict=True):
            host, side = self._slots.host_of(slot), self._slots.side_of(slot)
            # Each call to a lender has a deadline.
            with self._waits.open(f"memory of host {host.name} for a state"):
                try:
                    lent.append(await lend(rank, host, side))
                except ArenaSpace:
                    if not await self.memory.free_seconds(host):
                        raise
                    lent.append(await lend(rank, host, side))
        return lent

    async def _reshard(self, policy: PolicyName, gang: HostedGang, reason: str) -> None:
        """The policy continues with another number of ranks: each copies its rows of the state, and the base part is
        then copied to the host's memory as these ranks have it. Until that is whole, the state before is kept."""
        began = self._clock()
        async with self._needs(gang, self.memory.hosts_of(policy)):
            await self.memory.bring_back(policy)
            before = self._states(policy)
            ranks = [(state, rank.needed) for state, rank in zip(before, self.memory[policy], strict=True)]
            moved = await self._slots.at(
                gang, lambda slot, life, rank: slot.reshard(life, policy, gang.places[rank], ranks)
            )
        needed = await self._ask_needed(policy, gang)
        await self._save_resharded(policy, gang, needed, has_step=before[0].step is not None)
        reason = f"{reason}; its state is divided over {gang.parts} slots, before over {len(before)}"
        self._report_move(PolicyResumed, policy, gang, reason, moved, self._clock() - began)

    async def _save_resharded(
        self, policy: PolicyName, gang: HostedGang, needed: Sequence[StateBytes], *, has_step: bool
    ) -> None:
        """Copies the base part, as the gang's ranks have it, to the memory of their hosts. ``has_step``: the ranks have
        a step part too, which is then on their slots alone."""
        memory = self.memory.other_ranks(policy, needed)
        async with self._needs(gang, self._hosts_of(gang)), self._turn(policy, gang):
            try:
                lent = await self._lend(gang, memory, RankMemory.for_rest)
                saved = await self._slots.at_first_replica(
                    gang, lambda slot, life, rank: slot.set_rest(life, policy, lent[rank], [])
                )
                if self._hosts(policy, gang):
                    ranks_of = zip(memory, saved, lent, strict=True)
                    taking = [partial(rank.take_rest, rest, piece) for rank, rest, piece in ranks_of]
                    saved = await self._take(policy, gang, saved, taking)
                    if self._hosts(policy, gang):
                        before = self.memory.was_resharded(policy, memory, [rank.rest for rank in saved])
                        # At once: a slot that is lost from here on has the only step part, and what was trained into
                        # that is trained again. After the next line it would be too late.
                        gang.has_computed = has_step
                        await self.memory.free(before)
            finally:
                if self.memory[policy] is not memory:
                    await self.memory.free(memory)

    async def _build(self, policy: PolicyName, gang: HostedGang) -> None:
        """Raises StateTooLarge, ArenaSpace, and the errors of a folder that the policy can't start from."""
        await self._slots.at(gang, lambda slot, life, rank: slot.build(life, policy, gang.places[rank]))
        needed = await self._ask_needed(policy, gang)
        self._check_room(policy, needed)
        await self.memory.was_built(policy, needed)
        await self.set_weights(policy, gang)
        await self.save(policy, gang)
        await self.memory.free_excess()

    async def _ask_needed(self, policy: PolicyName, gang: HostedGang) -> list[StateBytes]:
        """The memory that the state needs, by its parts."""
        return await self._slots.at_first_replica(gang, lambda slot, life, _: slot.state_bytes(life, policy))

    def _check_room(self, policy: PolicyName, needed: Sequence[StateBytes]) -> None:
        """Raises StateTooLarge if a slot has too little memory for the policy on its fewest ranks."""
        room_gib, ranks = self._pool.config.slot_memory_gib, self._fewest_parts[policy]
        largest = max(needed, key=lambda size: size.on_slot)
        more = len(needed) / ranks  # it may be resumed on fewer slots than it was built on
        base, step = math.ceil(largest.base * more), math.ceil(largest.step * more)
        frozen = largest.on_slot - largest.base - largest.step
        if room_gib is not None and base + step + frozen > room_gib * 2**30:
            raise StateTooLarge(policy, base, step, frozen, ranks, int(room_gib * 2**30))

    # ------------------------------------------------------------------ from the slots

    async def set_weights(self, policy: PolicyName, gang: HostedGang) -> None:
        """Copies the weights to the host's memory, to be published. The policy's state there is the one before."""
        memory = self.memory[policy]
        lent = [await rank.for_weights() for rank in memory]
        parts = await self._slots.at_first_replica(
            gang, lambda slot, life, rank: slot.set_weights(life, policy, lent[rank])
        )
        if not self._hosts(policy, gang):
            return
        taking = [
            partial(rank.take_weights, part, piece)
            for rank, part, piece in zip(memory, parts, lent, strict=True)
        ]
        parts = await self._take(policy, gang, parts, taking)
        if self._hosts(policy, gang):
            for rank, part in zip(memory, parts, strict=True):
                rank.weights_were_set(part)

    async def save(self, policy: PolicyName, gang: HostedGang) -> None:
        """Copies the rest of the base part to the host's memory, beside the computations that follow: from then on
        the policy's state is this one. Raises SlotLost, and the errors of the transport."""
        # Nothing is awaited once the state is this one: a slot that is lost before the caller notes that would have the
        # step's samples trained into it again.
        memory = self.memory[policy]
        async with self._needs(gang, self._hosts_of(gang)), self._turn(policy, gang):
            if not self._hosts(policy, gang):
                return
            lent = await self._lend(gang, memory, RankMemory.for_rest)
            live = [[*rank.needed.live.values()] for rank in memory]
            with self._copy(policy, gang):
                rests = await self._slots.at_first_replica(
                    gang, lambda slot, life, rank: slot.set_rest(life, policy, lent[rank], live[rank])
                )
                if not self._hosts(policy, gang):
                    return
                ranks_of = zip(memory, rests, lent, strict=True)
                taking = [partial(rank.take_rest, rest, piece) for rank, rest, piece in ranks_of]
                rests = await self._take(policy, gang, rests, taking)
            if not self._hosts(policy, gang):
                return  # its computations wait again, for the state before
            for rank, rest in zip(memory, rests, strict=True):
                rank.rest_was_set(rest)

    async def copy_again(self, policy: PolicyName) -> None:
        """Has a second copy of the policy's state on another host, beside all computations: no call waits for it.
        Without one, the loss of the host is that of the state; a warning says so."""
        async with self._copying_again[policy]:
            try:
                await self.memory.copy_again(policy)
            except FlexmarlError as error:
                log.warning("no second copy of a state", policy=policy, reason=text_of(error))

    def _copy(self, policy: PolicyName, gang: HostedGang) -> AbstractContextManager[None]:
        """An open wait. Each call to a slot, and each fetch, has a deadline."""
        return self._waits.open(
            f"the copy of the state of {policy} to the host's memory", actor=gang.slots[0]
        )

    async def wait_saved(self, gang: HostedGang) -> None:
        """Returns when no state is being copied from the gang, whole or not."""
        # ``save`` names what it waits for: its turn, or the copy.
        await gang.is_saved.wait()

    @asynccontextmanager
    async def _turn(self, policy: PolicyName, gang: HostedGang) -> AsyncIterator[None]:
        """The policy's turn to have a newer state in the memory of its gang's hosts beside its present one: one policy
        of a host at a time, so that there is spare memory for one. A turn ends: the calls and fetches in it have
        deadlines."""
        hosts = self._hosts_of(gang)
        ahead = ", ".join(other for other, memories in self._turns if not memories.isdisjoint(hosts))
        turn = policy, set(hosts)
        self._turns.append(turn)
        try:
            async with AsyncExitStack() as stack:
                with self._waits.open(f"memory of the host for a newer state of {policy}, behind {ahead}"):
                    # In one order for all policies: two that have a host each would wait for the other's.
                    for host in sorted(hosts, key=lambda host: host.number):
                        await stack.enter_async_context(self._copying.setdefault(host, asyncio.Lock()))
                yield
        finally:
            self._turns.remove(turn)

    async def suspend(self, policy: PolicyName, gang: HostedGang, reason: str) -> None:
        """Has the whole state in the host's memory, and nothing on the slots. Raises SlotLost, and the errors of the
        transport."""
        self.records[policy].suspensions += 1
        await self.wait_saved(gang)
        began = self._clock()
        moved = [_NOTHING]
        if gang.has_computed:
            async with self._needs(gang, self._hosts_of(gang)):
                moved = await self._save_step(policy, gang)
        else:  # the state in the host's memory is this one
            await self._slots.at(gang, lambda slot, life, _: slot.drop(life, policy))
            if gang.has_computed:  # it is not any more: its step part was lost with a host meanwhile
                raise SlotLost(gang.slots[0], gang.lives[0], "the gradient in memory was lost with its host")
        self._report_move(PolicySuspended, policy, gang, reason, moved, self._clock() - began)

    async def _save_step(self, policy: PolicyName, gang: HostedGang) -> list[Moved]:
        """Has the step part in the memory of the gang's hosts, and nothing on the slots."""
        memory = self.memory[policy]
        lent = await self._lend(gang, memory, RankMemory.for_step)

        def leave(slot: SlotApi, life: str, rank: int) -> Awaitable[Suspended | None]:
            if rank < gang.parts:
                return slot.suspend(life, policy, lent[rank])
            return slot.drop(life, policy)  # the first replica has the same

        steps = [step for step in await self._slots.at(gang, leave) if step is not None]
        moved = [step.moved for step in steps]
        if self._hosts(policy, gang):
            ranks_of = zip(memory, steps, lent, strict=True)
            taking = [partial(rank.take_step, step, piece) for rank, step, piece in ranks_of]
            steps = await self._take(policy, gang, steps, taking)
        if self._hosts(policy, gang):
            for rank, step in zip(memory, steps, strict=True):
                rank.was_suspended(step)
        return moved

    async def _take(
        self,
        policy: PolicyName,
        gang: HostedGang,
        set_by_slots: list[T],
        taking: Sequence[Callable[[], Awaitable[T]]],
    ) -> list[T]:
        """States that the slots have set, now in the host's memory: ``taking`` fetches those of slots of other nodes.
        Raises SlotLost if a slot was lost before it was fetched, and the errors of ``StateTransport.take``."""

        async def forget(slot: SlotApi, life: str, _rank: int) -> None:
            await slot.forget_copies(life, policy)

        fetching = self._taking[policy] = asyncio.create_task(_all_of(taking), name=f"fetch {policy}")
        try:
            states: list[T] = await fetching
        except (TransportError, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and not task.cancelling():
                await self._slots.at(gang, forget)  # raises SlotLost if that is the reason
            raise
        if states != set_by_slots:
            await self._slots.at(gang, forget)
        return states

    def stop_taking(self, policy: PolicyName) -> None:
        """The policy has lost a slot: what is being fetched from its slots is of no use any more."""
        # A host that is cut off refuses no connection: the fetch would try again for as long as a fetch may take.
        if (fetching := self._taking.get(policy)) is not None:
            fetching.cancel()

    async def drop(self, policy: PolicyName, gang: HostedGang) -> None:
        """Has nothing on the gang's slots: what they have is in the host's memory, or lost. They may be lost too."""

        def drop(slot: SlotApi, life: str, _rank: int) -> Awaitable[None]:
            return slot.drop(life, policy)

        # A rank of a torn gang may wait for the one that was lost: its process is of no use then.
        timeout_s = TORN_TIMEOUT_S if gang.is_torn else WORK_TIMEOUT_S
        await self._slots.at_those_left(gang, drop, timeout_s)

    # ------------------------------------------------------------------ events

    def _report_move(
        self,
        kind: type[PolicyResumed | PolicySuspended],
        policy: PolicyName,
        gang: HostedGang,
        reason: str,
        moved: Sequence[Moved],
        seconds: float,
    ) -> None:
        """Counts and reports what was copied, of all ranks."""
        size_bytes = sum(copy.size_bytes for copy in moved)
        self.records[policy].moved_bytes += size_bytes
        path = ", ".join(dict.fromkeys(copy.path for copy in moved))
        self.report(kind(policy, ", ".join(gang.slots), reason, size_bytes, round(seconds, 6), path))

    def report(self, event: RunEvent) -> None:
        """Sends ``event`` to the console, after the earlier ones. Does not wait."""
        self._news.put_nowait(event)

    async def send_news(self) -> None:
        """The console may be stopped for hours (ctrl-Z): the pool does not wait for it."""
        while True:
            await self._pool.console.tell("event", await self._news.get(), timeout_s=WORK_TIMEOUT_S)


async def _all_of(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of all, at the same time. Raises the first error, when the others have ended."""

    # Functions, not coroutines: a fetch that is stopped before its begin would never await them.
    async def wait_for(call: Callable[[], Awaitable[T]]) -> T:
        return await call()

    with first_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait_for(call)) for call in calls]
    return [task.result() for task in tasks]
