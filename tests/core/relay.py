"""An actor that hands a call on to others and logs; spawned by class path, so it lives in a module of its own."""

import asyncio

import structlog

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef

log = structlog.get_logger()


class Relay(Actor):
    async def on_start(self) -> None:
        log.info("started without a request")

    @endpoint
    async def hand_on(self, others: "list[ActorRef[Relay]]") -> None:
        log.info("handing on", others=len(others))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._log_later())
        if others:
            await others[0].api.hand_on(others[1:])
        log.info("back")

    @endpoint
    async def log_as_another(self) -> None:
        log.info("explicit", actor="another")

    async def _log_later(self) -> None:
        await asyncio.sleep(0)
        log.info("in a task")
