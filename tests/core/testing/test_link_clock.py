"""Transfers on the clock of a loop."""

import asyncio

import pytest

from flexmarl.core.testing import virtual_time
from flexmarl.core.testing.link_clock import LinkClock


def test_transfers_share_a_port_as_long_as_they_last() -> None:
    async def main() -> list[float]:
        links, loop = LinkClock({"port": 10.0}), asyncio.get_running_loop()

        async def move(after_s: float, size: float) -> float:
            await asyncio.sleep(after_s)
            await links.transfer(size, {"port": 1.0}, 0.5)
            return loop.time()

        return [*await asyncio.gather(move(0.0, 100), move(0.0, 20), move(30.0, 10))]

    assert virtual_time.run(main()) == pytest.approx([12.5, 4.5, 31.5])


def test_a_cancelled_transfer_leaves_its_port_to_the_others() -> None:
    async def main() -> float:
        links, loop = LinkClock({"port": 10.0}), asyncio.get_running_loop()
        one = asyncio.create_task(links.transfer(100, {"port": 1.0}))
        other = asyncio.create_task(links.transfer(100, {"port": 1.0}))
        await asyncio.sleep(4.0)
        other.cancel()
        await one
        assert other.cancelled() and links.carried_bytes["port"] == pytest.approx(120)
        return loop.time()

    assert virtual_time.run(main()) == pytest.approx(12.0)
