"""Actors by name: of this process, of the processes it has started, and of the systems it is connected to."""

from collections.abc import Iterable
from typing import Any

from ..ref import ActorRef
from .local_actors import LocalActors
from .system_api import SystemApi


class Directory:
    def __init__(self, local: LocalActors) -> None:
        self._local = local
        self._upstream: list[ActorRef[SystemApi]] = []

    def add_upstream(self, address: str) -> None:
        """Adds ``address`` to the systems that are asked for names, without contacting it."""
        ref = self._local.system_actor(address)
        if ref not in self._upstream:
            self._upstream.append(ref)

    async def find(self, name: str, asked: Iterable[str] = ()) -> ActorRef[Any] | None:
        """The actor ``name``. ``asked``: the addresses of systems that take part in the search already, so that none is
        asked twice. Raises what a call to another system raises."""
        local = self._local
        if local.address in asked:
            return None
        if local.has_actor(name):
            return local.ref(name, local.address)
        for supervisor in local.supervisors:
            if (child := supervisor.find(name)) is not None:
                return child
        for upstream in self._upstream:
            if (found := await upstream.api.lookup(name, (*asked, local.address))) is not None:
                return found
        return None
