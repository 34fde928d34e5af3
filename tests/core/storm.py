"""A program of many tasks that draws what it does from a seed and logs each step: ``python storm.py SEED``.

Most delays are equal, so that the order of events at one instant matters; events in another order draw other
numbers, so that the logs of two runs differ from there on.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator

from flexmarl.core.testing.virtual_time import run

DELAYS_S = (0.0, 1.0, 1.0, 1.0, 2.5, 60.0)


class Storm:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = asyncio.Lock()
        self.queue = asyncio.Queue[int](maxsize=3)
        self.kept: list[object] = []  # what is still running when main() ends
        self.lines: list[str] = []

    def log(self, event: str) -> None:
        task = asyncio.current_task()
        name = task.get_name() if task else "callback"
        self.lines.append(f"{asyncio.get_running_loop().time()!r} {name} {event}")

    async def main(self) -> None:
        numbers = [self.numbers(i) for i in range(20)]
        for number in numbers:
            await anext(number)
        self.kept += [asyncio.create_task(self.linger()) for _ in range(20)]
        self.kept += numbers
        for _ in range(40):
            await self.group(3)

    async def numbers(self, index: int) -> AsyncIterator[int]:
        try:
            yield index
        finally:
            self.log(f"closes generator {index}")

    async def linger(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.log("is cancelled")

    async def walk(self, depth: int) -> None:
        self.log("starts")
        try:
            for _ in range(self.random.randrange(1, 5)):
                actions = [self.sleep, self.hold_lock, self.put, self.get, self.fail]
                if depth:
                    actions += [lambda: self.group(depth - 1), lambda: self.race(depth - 1)]
                await self.random.choice(actions)()
        except BaseException as error:
            self.log(f"raises {type(error).__name__}")
            raise
        self.log("ends")

    def delay_s(self) -> float:
        return self.random.choice(DELAYS_S)

    async def sleep(self) -> None:
        await asyncio.sleep(self.delay_s())

    async def hold_lock(self) -> None:
        async with self.lock:
            self.log("holds the lock")
            await asyncio.sleep(self.delay_s())

    async def put(self) -> None:
        try:
            async with asyncio.timeout(self.delay_s()):
                await self.queue.put(self.random.randrange(100))
        except TimeoutError:
            self.log("could not put")

    async def get(self) -> None:
        try:
            self.log(f"got {await asyncio.wait_for(self.queue.get(), self.delay_s())}")
        except TimeoutError:
            self.log("got nothing")

    async def fail(self) -> None:
        if self.random.random() < 0.3:
            raise ValueError("drawn")

    async def group(self, depth: int) -> None:
        try:
            async with asyncio.timeout(100.0), asyncio.TaskGroup() as group:
                for _ in range(self.random.randrange(2, 6)):
                    group.create_task(self.walk(depth))
        except* (ValueError, TimeoutError) as errors:
            self.log(f"group failed with {[type(error).__name__ for error in errors.exceptions]}")

    async def race(self, depth: int) -> None:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(self.random.randrange(1, 6))]
        for future in futures:
            loop.call_later(self.delay_s(), future.cancel)
        tasks = [asyncio.create_task(self.walk(depth)) for _ in range(self.random.randrange(1, 6))]
        racers: list[asyncio.Future[None]] = [*futures, *tasks]
        try:
            done, pending = await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
            first, others = ([racers.index(racer) for racer in racers_in] for racers_in in (done, pending))
            self.log(f"race: {first} before {others}")
        finally:
            for racer in set(racers):
                racer.cancel()
            await asyncio.gather(*racers, return_exceptions=True)


async def started(storms: list[Storm], seed: int) -> None:
    storms.append(Storm(seed))
    await storms[0].main()


def lines_of(seed: int) -> list[str]:
    storms: list[Storm] = []
    run(started(storms, seed))
    return storms[0].lines


def litter() -> list[object]:
    """Fills half of the memory in between, at random: what is made next has addresses in no order."""
    made: list[object] = [bytearray(random.randrange(1, 500)) for _ in range(50_000)]
    return [thing for thing in made if random.random() < 0.5]


if __name__ == "__main__":
    for _ in range(2):
        kept = litter()
        sys.stdout.write("\n".join(lines_of(int(sys.argv[1]))) + "\n\n")
