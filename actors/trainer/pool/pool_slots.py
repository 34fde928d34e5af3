"""The slot workers of a shared pool as their facade sees them: their lives, and calls to gangs of them.

A worker is lost when its ``enlist`` stream ends or a call to it fails. From then on calls to that life fail here,
before they are sent; the supervisor kills its process, so that nothing writes to the host's memory any more; and then
the listener is notified. If the worker was lost with its host, the listener hears of the host first: states that lay
there are gone, or are on another host, before their policies are bound again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from ....core.base.texts import text_of
from ....core.errors import ActorDead, CallTimeout, FlexmarlError, is_loss
from ....core.ref import ActorRef
from ....core.supervision.system_api import FOR_EVER
from ....core.system import ActorSystem
from ....core.telemetry import get_logger
from ...errors import UnequalSlots, WorkerReplaced
from ...messages import WORK_TIMEOUT_S, GangPlace, SlotApi, SlotLife
from ...names import PolicyName, SlotName
from ..trainer_setup import SharedPoolSetup
from .gangs import Slots
from .state_hosts import StateHost, StateHosts

T = TypeVar("T")
SlotCall = Callable[[SlotApi, str, int], Awaitable[T]]
"""Calls a slot worker, given the life that is meant and the gang's rank there."""

log = get_logger(__name__)

# A worker that can't be reached is being started.
_RETRY_S: Final = 0.1


class SlotLost(Exception):
    """A call to one life of a slot worker failed, and no later call to it can succeed.

    ``is_reported``: the worker reported its end; its supervisor decides by the error, and has nothing to kill.
    """

    def __init__(self, slot: SlotName, life: str, error: FlexmarlError | str) -> None:
        reason = error if isinstance(error, str) else _reason(error)
        super().__init__(slot, life, reason)
        self.slot, self.life, self.reason = slot, life, reason
        self.is_reported = isinstance(error, ActorDead) and error.reported


def _is_set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False, slots=True)
class HostedGang:
    """A policy on slots. ``lives``: of each rank's slot, empty if it was just lost. ``places``: the ranks, without
    their meeting before ``PoolSlots.enter``. ``replicas``: of the policy, on as many slots each.

    ``is_torn``: it is the rest of a gang that has lost a slot. ``is_dropped``: nothing of it is needed any more.
    ``is_prefetched``: its state is there, and its processes have not met. ``is_loaded``: it can compute.
    ``has_computed``: its state is not the one in the host's memory any more, or not the one that is being copied there
    until ``is_saved``. ``is_cut``: a host of its slots is lost, and these are about to be. ``remaining``: the slots
    that are not lost. A slot that was lost may be lost again in its next life, while the rest of the gang is dropped:
    that does not concern the gang.
    """

    slots: Slots
    lives: tuple[str, ...]
    places: tuple[GangPlace, ...]
    replicas: int = 1
    is_torn: bool = False
    is_dropped: bool = False
    is_prefetched: bool = False
    is_loaded: bool = False
    has_computed: bool = False
    is_cut: bool = False
    remaining: set[SlotName] = field(default_factory=set)
    is_saved: asyncio.Event = field(default_factory=_is_set)

    @property
    def parts(self) -> int:
        """The parts that the policy's state is divided into: the first ranks have one each, and those of further
        replicas the same."""
        return len(self.slots) // self.replicas


class SlotListener(Protocol):
    """The pool, as its slots see it."""

    def slot_joined(self, slot: SlotName) -> None:
        """A life of a worker begins, at the start or after a loss."""

    def slot_lost(self, slot: SlotName, reason: str) -> None:
        """A worker's process is dead."""


class PoolSlots:
    """``hosts``: of the memory that the slots' states go to."""

    def __init__(
        self,
        pool: SharedPoolSetup,
        listener: SlotListener,
        hosts: StateHosts,
        system: ActorSystem,
        background: Callable[[Coroutine[Any, Any, None], str], None],
        watch: Callable[[ActorRef[Any]], None],
    ) -> None:
        """``system``: the trainer's. ``background`` and ``watch``: as of ``Actor``."""
        self.hosts = hosts
        self._refs = {SlotName(ref.name): ref for ref in pool.slots}
        self._supervisor = pool.supervisor
        self._system = system
        self._listener, self._background, self._watch = listener, background, watch
        self._lives: dict[SlotName, SlotLife] = {}
        self._host_of: dict[SlotName, StateHost] = {}
        self._versions: dict[str, str] = {}
        self._ended: set[str] = set()
        self._stopped: set[SlotName] = set()
        self._losing = {slot: asyncio.Lock() for slot in self._refs}
        self._joined = asyncio.Event()
        self._all_joined = False

    async def start(self) -> list[SlotName]:
        """The slots, when every worker lives. Later lives are reported to the listener."""
        for ref in self._refs.values():
            self._background(self._tend(ref), f"slot {ref.name}")
        while len(self._lives) < len(self._refs):
            self._joined.clear()
            await self._joined.wait()
        self._all_joined = True
        return [*self._refs]

    def gang(self, slots: Slots, replicas: int = 1, *, is_torn: bool = False) -> HostedGang:
        """A new binding of a policy, or the rest of a torn one."""
        lives = tuple(self._life_of(slot) for slot in slots)
        places = _places(len(slots), replicas)
        return HostedGang(slots, lives, places, replicas, is_torn, remaining=set(slots))

    def host_of(self, slot: SlotName) -> StateHost:
        """The host whose memory the slot's states go to: the one of its last life."""
        return self._host_of.get(slot, self.hosts.head)

    def side_of(self, slot: SlotName) -> int | None:
        """The side of its host on which the slot's devices are; None if it is not known, or the slot is lost."""
        life = self._lives.get(slot)
        return None if life is None else life.side

    def lose_host(self, host: StateHost, reason: str) -> None:
        """Loses all slots of a host that is lost. Does not wait."""
        for slot, other in self._host_of.items():
            if other is host and (life := self._life_of(slot)):
                lost = SlotLost(slot, life, f"host {host.name} is lost: {reason}")
                self._background(self.lose(lost), f"loss of {slot}")

    async def enter(self, policy: PolicyName, gang: HostedGang) -> None:
        """Has the slots' processes in this gang, as soon as they are in no other, and its meeting open. Raises as
        ``at`` does."""
        if len(gang.slots) == 1:
            return
        over_hosts = len({life.node for slot in gang.slots if (life := self._lives.get(slot))}) > 1
        meeting, *_ = await self.at(gang, lambda slot, life, rank: slot.enter(life, policy, rank, over_hosts))
        gang.places = _places(len(gang.slots), gang.replicas, meeting)

    async def at(self, gang: HostedGang, call: SlotCall[T], timeout_s: float = WORK_TIMEOUT_S) -> list[T]:
        """The results of one call at each rank's slot. Raises SlotLost, also for a worker that has not answered after
        ``timeout_s``, and the errors of the call. Of a gang that has lost a slot, the others are not called."""
        _check_complete(gang)
        return _results(await self._ends(gang, call, timeout_s, len(gang.slots)))

    async def at_first_replica(self, gang: HostedGang, call: SlotCall[T]) -> list[T]:
        """The same at the ranks of the first replica, which have all parts of the state."""
        _check_complete(gang)
        return _results(await self._ends(gang, call, WORK_TIMEOUT_S, gang.parts))

    async def at_those_left(self, gang: HostedGang, call: SlotCall[Any], timeout_s: float) -> None:
        """The same for slots that may be lost: those that don't answer are, when this returns."""
        for end in await self._ends(gang, call, timeout_s, len(gang.slots)):
            if isinstance(end, SlotLost):
                await self.lose(end)
            elif isinstance(end, BaseException):
                raise end

    async def _ends(
        self, gang: HostedGang, call: SlotCall[T], timeout_s: float, ranks: int
    ) -> list[T | BaseException]:
        members = enumerate([*zip(gang.slots, gang.lives, strict=True)][:ranks])
        return await asyncio.gather(
            *(self._call(slot, life, rank, call, timeout_s) for rank, (slot, life) in members),
            return_exceptions=True,
        )

    async def _call(self, slot: SlotName, life: str, rank: int, call: SlotCall[T], timeout_s: float) -> T:
        if self._life_of(slot) != life or not life:
            raise SlotLost(slot, life, "it was lost")
        try:
            return await call(self._refs[slot].within(timeout_s), life, rank)
        except (ActorDead, CallTimeout, WorkerReplaced) as error:
            raise SlotLost(slot, life, error) from error

    def _life_of(self, slot: SlotName) -> str:
        """Empty if the worker was lost."""
        life = self._lives.get(slot)
        return "" if life is None else life.life

    # ------------------------------------------------------------------ lives

    async def _tend(self, ref: ActorRef[SlotApi]) -> None:
        """Takes in one life of a worker after the other. Raises UnequalSlots."""
        slot = SlotName(ref.name)
        while True:
            life: SlotLife | None = None
            end: FlexmarlError | str = "it ended"
            try:
                async with aclosing(ref.within(FOR_EVER).enlist()) as lives:
                    async for life in lives:
                        host = await self._find_host(slot)
                        async with self._losing[slot]:  # the listener is notified of the loss before
                            self._register(slot, life, host)
            except FlexmarlError as error:
                if not is_loss(error):
                    raise
                end = error
            if slot in self._stopped:
                return
            if life is not None:
                await self.lose(SlotLost(slot, life.life, end))
            await asyncio.sleep(_RETRY_S)
            # Its next life is at another address if its host is lost.
            if (address := await self._supervisor.within(WORK_TIMEOUT_S).locate(slot)) not in (
                "",
                ref.address,
            ):
                ref = self._refs[slot] = self._system.ref(slot, address, SlotApi)

    async def _find_host(self, slot: SlotName) -> StateHost:
        return await self.hosts.at(await self._supervisor.within(WORK_TIMEOUT_S).locate_node(slot))

    def _register(self, slot: SlotName, life: SlotLife, host: StateHost) -> None:
        if life.life in self._ended:  # given up, and not killed yet
            return
        self._versions[slot] = life.torch
        if len(set(self._versions.values())) > 1:
            raise UnequalSlots(self._versions)
        self._lives[slot], self._host_of[slot] = life, host
        self._watch(self._refs[slot])
        self._joined.set()
        if self._all_joined:
            self._listener.slot_joined(slot)

    def stopped(self, name: str) -> None:
        """A worker is stopped in good order: the run ends, and it is not missed."""
        self._stopped.add(SlotName(name))

    async def lose(self, lost: SlotLost) -> None:
        """See the module's text; returns when all is done. Does nothing if the worker is stopped in good order."""
        slot = lost.slot
        if slot in self._stopped:
            return
        # This loss is known already, but its process may still be about to be killed.
        if self._life_of(slot) != lost.life or not lost.life:
            async with self._losing[slot]:
                return
        incarnation = self._lives.pop(slot).incarnation
        self._ended.add(lost.life)
        async with self._losing[slot]:
            log.warning("slot worker lost", name=slot, incarnation=incarnation, reason=lost.reason)
            if not lost.is_reported:
                await self._supervisor.within(WORK_TIMEOUT_S).lost(slot, incarnation, lost.reason)
            await self.hosts.check(self.host_of(slot))
            if self._all_joined:
                self._listener.slot_lost(slot, lost.reason)


def _check_complete(gang: HostedGang) -> None:
    """Raises SlotLost if a slot was lost."""
    # The policy may be bound again by now, with another gang on the same slots: a call that was held up on its way here
    # would suspend that one, or have its state written to memory that belongs to another.
    for slot, life in zip(gang.slots, gang.lives, strict=True):
        if slot not in gang.remaining:
            raise SlotLost(slot, life, "it was lost")


def _results(ends: Sequence[T | BaseException]) -> list[T]:
    """All of them, or raises an error among them."""
    errors = [end for end in ends if isinstance(end, BaseException)]
    # The other ranks of a gang fail too when one of them is lost.
    for error in sorted(errors, key=lambda error: not isinstance(error, SlotLost)):
        raise error
    return [end for end in ends if not isinstance(end, BaseException)]


def _places(size: int, replicas: int, meeting: str = "") -> tuple[GangPlace, ...]:
    return tuple(GangPlace(rank, size, meeting, replicas) for rank in range(size))


def _reason(error: FlexmarlError) -> str:
    return error.reason if isinstance(error, ActorDead) else text_of(error)
