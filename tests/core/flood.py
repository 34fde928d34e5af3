"""A consumer that takes its time; spawned by class path, so it lives in a module of its own."""

import time

import psutil

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.protocol.codec import Buffer


class SlowConsumer(Actor):
    def __init__(self) -> None:
        self._numbers: list[int] = []

    @endpoint
    async def consume(self, number: int, payload: str) -> None:
        time.sleep(0.0005)  # noqa: ASYNC251  # the work of a handler that keeps its loop busy
        self._numbers.append(number)

    @endpoint
    async def consume_buffer(self, number: int, payload: Buffer) -> None:
        time.sleep(0.0005)  # noqa: ASYNC251  # as above
        self._numbers.append(number)

    @endpoint
    async def consumed(self) -> list[int]:
        return self._numbers

    @endpoint
    async def rss_mib(self) -> float:
        return psutil.Process().memory_info().rss / 2**20
