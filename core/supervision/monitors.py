"""Who lives and dies with whom: watching an actor, and binding two fates (OTP's monitors and links)."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from ..actor import Actor, DeadActor
from ..errors import ActorDead, ActorFailed, RemoteError, RemoteProtocolError, text_of
from ..ref import ActorRef
from .system_actor import FOR_EVER, SystemActor

Api = TypeVar("Api")

_REMEMBERED = 1024


class MonitoredSystem(Protocol):
    """The part of a system that its monitors use."""

    name: str

    @property
    def address(self) -> str: ...

    def ref(self, name: str, address: str, api: type[Api] | None = None) -> ActorRef[Api]: ...

    def serves(self, name: str) -> bool: ...

    def has_actor(self, name: str) -> bool: ...

    def run_background(self, actor: Actor, work: Coroutine[Any, Any, None], name: str) -> None: ...


class _Watcher:
    """Who waits for an actor's death: ``told`` what it died of, and whether that has been ``passed_on``."""

    __slots__ = ("passed_on", "told")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.told: asyncio.Future[DeadActor] = loop.create_future()
        self.passed_on: asyncio.Future[None] = loop.create_future()


class Fates:
    """The deaths of one system's actors, for whoever waits for them, and the deaths that its actors wait for."""

    def __init__(self, system: MonitoredSystem) -> None:
        self._system = system
        self._watchers: dict[str, dict[_Watcher, None]] = {}
        self._stopped: OrderedDict[str, str] = OrderedDict()
        """Names of actors that were stopped in good order, and why; the last ones."""

    # ------------------------------------------------------------------ deaths here

    async def deaths(self, name: str) -> AsyncGenerator[DeadActor]:
        """The death of an actor of this system, as soon as it has died; nothing else comes."""
        system = self._system
        if not system.serves(name):
            reason = f"{system.name} has no actor of that name"
            if system.has_actor(name):
                reason = "it is being restarted"
            yield DeadActor(name, system.address, self._stopped.get(name, reason), name in self._stopped)
            return
        watcher = _Watcher()
        self._watchers.setdefault(name, {})[watcher] = None
        try:
            yield await watcher.told
        finally:
            watcher.passed_on.set_result(None)
            del self._watchers[name][watcher]
            if not self._watchers[name]:
                del self._watchers[name]

    def ends(self, name: str, reason: str, *, stopped: bool) -> None:
        """An actor of this system begins to stop, or has died: what those are told who ask from now on."""
        self._stopped.pop(name, None)
        if stopped:
            self._stopped[name] = reason
            if len(self._stopped) > _REMEMBERED:
                self._stopped.popitem(last=False)

    def announce(self, name: str, reason: str, *, stopped: bool) -> None:
        """An actor of this system has ended."""
        self.ends(name, reason, stopped=stopped)
        for watcher in self._watchers.get(name, ()):
            if not watcher.told.done():
                watcher.told.set_result(DeadActor(name, self._system.address, reason, stopped))

    def pending(self) -> list[asyncio.Future[None]]:
        """Done when those who watch have passed on what they were told."""
        return [watcher.passed_on for watchers in self._watchers.values() for watcher in watchers]

    # ------------------------------------------------------------------ deaths anywhere

    def watch(self, actor: Actor, ref: ActorRef[Any]) -> None:
        """See ``Actor.watch``."""

        async def watch() -> None:
            await actor.on_dead(await self._await_death(ref))

        self._system.run_background(actor, watch(), f"watch {ref.name}")

    def link(self, actor: Actor, ref: ActorRef[Any]) -> None:
        """See ``Actor.link``."""

        async def bind() -> None:
            remote = self._system.ref("system", ref.address, SystemActor)
            with suppress(ActorDead, ActorFailed):  # told below, in the words of its death
                await remote.api.bind_fate(ref.name, actor.ref)
            await self._share(ref)

        self._system.run_background(actor, bind(), f"link {ref.name}")

    def bind(self, actor: Actor, ref: ActorRef[Any]) -> None:
        """From now on ``actor``, of this system, fails when the one behind ``ref`` dies."""
        self._system.run_background(actor, self._share(ref), f"link {ref.name}")

    async def _share(self, ref: ActorRef[Any]) -> None:
        dead = await self._await_death(ref)
        if not dead.stopped:
            raise ActorDead(ref.name, dead.reason)

    async def _await_death(self, ref: ActorRef[Any]) -> DeadActor:
        remote = self._system.ref("system", ref.address, SystemActor)
        try:
            async with aclosing(remote.within(FOR_EVER).deaths(ref.name)) as deaths:
                async for dead in deaths:
                    return dead
            reason = "its system ended"
        except ActorDead as dead_system:
            return DeadActor(ref.name, ref.address, dead_system.reason, dead_system.stopped)
        except (ActorFailed, RemoteError, RemoteProtocolError) as error:
            reason = text_of(error)
        return DeadActor(ref.name, ref.address, reason)
