"""Monitors of actors, as in OTP: ``Actor.watch``."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ..actor import Actor, DeadActor
from ..base.texts import text_of
from ..errors import ActorDead, ActorFailed, RemoteError, RemoteProtocolError
from ..ref import ActorRef
from .system_api import FOR_EVER

if TYPE_CHECKING:
    from .local_actors import LocalActors

# A watch that comes after the stop gets its reason, and not "no such actor". Bounded, as names may be new each time.
_REMEMBERED_STOPS = 1024


class _Monitor:
    """One watcher of a local actor. ``exit``: set when the actor has ended; ``delivered``: when the watcher knows."""

    __slots__ = ("delivered", "exit")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exit: asyncio.Future[DeadActor] = loop.create_future()
        self.delivered: asyncio.Future[None] = loop.create_future()


class Monitors:
    """Reports exits of local actors to their watchers, and exits of any actor to local watchers."""

    def __init__(self, actors: "LocalActors") -> None:
        self._actors = actors
        self._monitors: dict[str, dict[_Monitor, None]] = {}
        self._stopped: OrderedDict[str, str] = OrderedDict()
        """The reasons of the last actors that were stopped in good order, by name."""

    # ------------------------------------------------------------------ exits of local actors

    async def exits(self, name: str) -> AsyncGenerator[DeadActor]:
        """The exit of a local actor as soon as it has ended: one item."""
        actors = self._actors
        if not actors.serves(name):
            reason = f"{actors.name} has no actor of that name"
            if actors.has_actor(name):
                reason = "it is being restarted"
            yield DeadActor(name, actors.address, self._stopped.get(name, reason), name in self._stopped)
            return
        monitor = _Monitor()
        self._monitors.setdefault(name, {})[monitor] = None
        try:
            yield await monitor.exit
        finally:
            # The stream is closed when the watcher has read its item, or has gone: either way it needs no more time.
            monitor.delivered.set_result(None)
            del self._monitors[name][monitor]
            if not self._monitors[name]:
                del self._monitors[name]

    def remember(self, name: str, reason: str, *, stopped: bool) -> None:
        """Sets the reason that later watchers of ``name`` get: it begins to stop, or has failed."""
        self._stopped.pop(name, None)
        if stopped:
            self._stopped[name] = reason
            if len(self._stopped) > _REMEMBERED_STOPS:
                self._stopped.popitem(last=False)

    def notify(self, name: str, reason: str, *, stopped: bool) -> None:
        """Reports the exit of a local actor to its watchers."""
        self.remember(name, reason, stopped=stopped)
        for monitor in self._monitors.get(name, ()):
            if not monitor.exit.done():
                monitor.exit.set_result(DeadActor(name, self._actors.address, reason, stopped))

    def undelivered(self) -> list[asyncio.Future[None]]:
        """One future per watcher of a local actor, done when the exit has been passed on to it."""
        return [monitor.delivered for monitors in self._monitors.values() for monitor in monitors]

    # ------------------------------------------------------------------ watching any actor

    def watch(self, actor: Actor, ref: ActorRef[Any]) -> None:
        """See ``Actor.watch``."""

        # A watch is a stream that stays open, and not a subscription: an open stream has the peer pinged, so that a
        # silent process counts as dead, and it ends by itself if the watcher's process does.
        async def watch() -> None:
            await actor.on_dead(await self._wait_exit(ref))

        self._actors.run_background(actor, watch(), f"watch {ref.name}")

    async def _wait_exit(self, ref: ActorRef[Any]) -> DeadActor:
        remote = self._actors.system_actor(ref.address)
        try:
            async with aclosing(remote.within(FOR_EVER).exits(ref.name)) as exits:
                async for dead in exits:
                    return dead
            reason = "its system ended"
        except ActorDead as dead_system:
            return DeadActor(ref.name, ref.address, dead_system.reason, dead_system.stopped)
        except (ActorFailed, RemoteError, RemoteProtocolError) as error:
            reason = text_of(error)
        return DeadActor(ref.name, ref.address, reason)
