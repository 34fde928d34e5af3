"""A console that keeps what the store tells it."""

import asyncio
from typing import Any

from flexmarl.core.actor import Actor, endpoint


class Listener(Actor):
    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

    @endpoint
    async def event(self, event: str, fields: dict[str, Any]) -> None:
        self.events.put_nowait((event, fields))
