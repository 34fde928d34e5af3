"""The hosts whose memory training states lie in, as the trainer knows them: its own, and those whose lender it has
enlisted.

    a slot's life begins            StateHosts.at       enlists the lender of its node, unless it is there already
    the lender's stream ends        StateHosts.lose     the host is lost, with all that lies there
    a slot or a copy fails          StateHosts.check    asks the lender: a host that is lost is known as lost before the
                                                        pool decides where its policies continue
    the node joins again            StateHosts.at       enlists the next life of its lender, whose memory is empty
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from ....core.base.texts import text_of
from ....core.errors import ActorDead, CallTimeout, FlexmarlError
from ....core.ref import ActorRef
from ....core.supervision.system_api import FOR_EVER
from ....core.system import ActorSystem
from ....core.telemetry import get_logger
from ....core.waits import OpenWaits, Wait
from ....transport.state import StateTransport
from ...messages import LenderApi, StateLender
from .lender import LENDER, TRANSFER_TIMEOUT_S, Lending
from .spare_memory import SpareMemory

log = get_logger(__name__)

# A lender answers at once; its first call opens a socket.
_ENLIST_S: Final = 60.0
# The heartbeats of a lost host are missed earlier.
_PING_S: Final = 60.0


@dataclass(eq=False, slots=True)
class StateHost:
    """A host with memory for states. ``name``: for people. ``number``: counted as they join. ``spare``: pieces of it
    that no state lies in. ``is_head``: it is the trainer's own. ``is_lost``: nothing of it can be reached any more."""

    name: str
    lender: StateLender
    number: int = 0
    is_head: bool = False
    is_lost: bool = False
    spare: SpareMemory = field(init=False)

    def __post_init__(self) -> None:
        self.spare = SpareMemory(self.lender)


class StateHosts:
    """``head``: the trainer's host, whose memory ``transport`` lends. ``system`` and ``background``: the trainer's.
    ``encrypted``: what hosts read of each other. ``joined`` is called with each new host, and ``lost`` with one that is
    lost, and the reason."""

    def __init__(
        self,
        transport: StateTransport,
        system: ActorSystem,
        background: Callable[[Coroutine[Any, Any, None], str], None],
        *,
        encrypted: bool,
        joined: Callable[[StateHost], None] = lambda host: None,
        lost: Callable[[StateHost, str], None] = lambda host, reason: None,
    ) -> None:
        self.head = StateHost("the head", Lending(transport), is_head=True)
        self.joined, self.lost = joined, lost
        self._system, self._background, self._encrypted = system, background, encrypted
        self._hosts: dict[str, StateHost] = {}
        """By the address of the node's process."""
        self._enlisting: dict[str, asyncio.Lock] = {}
        self._numbers = itertools.count(1)
        self._waits = OpenWaits()

    @property
    def all(self) -> list[StateHost]:
        """Those that are not lost, the head first."""
        return [self.head, *(host for host in self._hosts.values() if not host.is_lost)]

    def waits(self) -> list[Wait]:
        """See ``Actor.waits``: lenders that have not answered."""
        return self._waits.current()

    async def at(self, address: str) -> StateHost:
        """The host of the node whose process has ``address``; the head if that is empty, or if the node lends
        nothing."""
        if not address:
            return self.head
        async with self._enlisting.setdefault(address, asyncio.Lock()):
            host = self._hosts.get(address)
            if host is None or host.is_lost:
                host = await self._enlist(address)
            return host

    async def _enlist(self, address: str) -> StateHost:
        ref = self._system.ref(LENDER, address, LenderApi)
        enlisted: asyncio.Future[StateHost] = asyncio.get_running_loop().create_future()
        self._background(self._tend(ref, enlisted), f"memory at {address}")
        try:
            with self._waits.open(f"the memory of the host at {address}"):
                async with asyncio.timeout(_ENLIST_S):
                    return await enlisted
        except (FlexmarlError, TimeoutError) as error:
            log.warning(
                "states of a host's slots are copied to the head's memory, as the host lends none",
                address=address,
                reason=text_of(error) or f"no answer after {_ENLIST_S:g} s",
            )
            return self.head

    async def _tend(self, ref: ActorRef[LenderApi], enlisted: "asyncio.Future[StateHost]") -> None:
        """Holds one life of a lender until it ends."""
        host, end = None, "it ended"
        try:
            async with aclosing(ref.within(FOR_EVER).enlist(self._encrypted)) as lives:
                async for life in lives:
                    lender = ref.within(TRANSFER_TIMEOUT_S)
                    host = self._hosts[ref.address] = StateHost(life.host, lender, next(self._numbers))
                    self.joined(host)
                    if not enlisted.done():
                        enlisted.set_result(host)
        except FlexmarlError as error:
            end = error.reason if isinstance(error, ActorDead) else text_of(error)
            if not enlisted.done():
                enlisted.set_exception(error)
        if host is not None:
            self.lose(host, end)
        elif not enlisted.done():
            enlisted.set_exception(ActorDead(ref.name, end))

    def lose(self, host: StateHost, reason: str) -> None:
        """``host`` is lost, for ``reason``. Does nothing if that is known already."""
        if host.is_lost or host.is_head:
            return
        host.is_lost = True
        log.warning("the memory of a host is lost", host=host.name, reason=reason)
        self.lost(host, reason)

    async def check(self, host: StateHost) -> None:
        """Returns when it is known if ``host`` is lost."""
        if host.is_lost or host.is_head:
            return
        try:
            async with asyncio.timeout(_PING_S):
                with self._waits.open(f"an answer of the memory of host {host.name}"):
                    await host.lender.ping()
        except (ActorDead, CallTimeout, TimeoutError) as error:
            end = error.reason if isinstance(error, ActorDead) else f"no answer after {_PING_S:g} s"
            self.lose(host, end)
