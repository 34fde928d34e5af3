"""A console that keeps the events of the store."""

import asyncio

from flexmarl.actors.run_events import RunEvent
from flexmarl.core.actor import Actor, endpoint


class Listener(Actor):
    def __init__(self) -> None:
        self.events: asyncio.Queue[RunEvent] = asyncio.Queue()

    @endpoint
    async def event(self, event: RunEvent) -> None:
        self.events.put_nowait(event)
