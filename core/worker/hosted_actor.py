"""The life of a supervised actor that has a system of its own: in a process, or in memory."""

import asyncio
from contextlib import nullcontext
from typing import Any

from ..actor import Actor
from ..base.collector import importing, spare_collector
from ..base.texts import traceback_of
from ..errors import origin_of
from ..ref import ActorRef
from ..signature import constructor_signature
from ..supervision.worker_init import WorkerInit, import_class
from ..system import ActorSystem
from ..telemetry import get_logger

log = get_logger(__name__)

# The supervisor's process may be stopped (ctrl-Z) for days, and is asked nothing else.
_REPORT_TIMEOUT_S = 30 * 24 * 3600.0


class HostedActor:
    """``actor``: None until its constructor has returned. ``owns_process``: nothing else runs in this process."""

    def __init__(self, name: str, init: WorkerInit, *, owns_process: bool) -> None:
        self.actor: Actor | None = None
        self._name = name
        self._init = init
        self._owns_process = owns_process

    async def serve(self, system: ActorSystem) -> bool:
        """Makes the actor in ``system``, and reports its start and its failure to its supervisor. Returns True when the
        supervisor has asked it to stop, False after a failure."""
        name, init = self._name, self._init
        system._local.reserve(name)  # calls to an actor that is being restarted wait for the end of its start
        system._local.network.trust(init.supervisor["address"])  # its end is noticed in another way
        system._directory.add_upstream(init.supervisor["address"])
        supervisor: ActorRef[Any] = system.ref(init.supervisor["name"], init.supervisor["address"])
        try:
            self.actor = self._build(system)
            await system.add(self.actor, name)
            if self._owns_process:
                spare_collector()
            await supervisor.ask("ready", name, init.epoch, timeout_s=_REPORT_TIMEOUT_S)
            error = await _wait_stopped(system)
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            raise
        except BaseException as raised:  # noqa: BLE001  # supervision: any error is reported, and ends the actor
            error = raised
        if error is None:
            return True
        text = traceback_of(error)
        log.error("actor failed", error=text)
        # With the error: there will be no process to ask for them.
        spans = system.spans.take(system.spans.share, received=0)
        report = *origin_of(error, name), text, spans
        await supervisor.ask("failed", name, *report, timeout_s=_REPORT_TIMEOUT_S)
        return False

    def _build(self, system: ActorSystem) -> Actor:
        init = self._init
        with importing() if self._owns_process else nullcontext():
            actor_class: Any = import_class(init.actor_class)
        constructor = constructor_signature(actor_class)
        args, kwargs = constructor.arguments(init.args, init.kwargs, system._local.network)
        actor: Actor = actor_class(*args, **kwargs)
        return actor


async def _wait_stopped(system: ActorSystem) -> BaseException | None:
    """Waits for a request to stop, or for a failure: returns None, or its error."""
    stop = asyncio.ensure_future(system._system_actor.stop_requested.wait())
    ends: list[asyncio.Future[Any]] = [stop, system.failure]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
    return system.failure.result() if system.failure.done() else None
