"""Fixtures of the tests of the rollout actor. They run in virtual time: deadlines pass as exactly as on an idle
machine, and at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from flexmarl.core.system import ActorSystem
from flexmarl.core.testing.virtual_time import VirtualTimeLoop
from flexmarl.core.wire.memory import MemoryNetwork

from .fake_cluster import FakeCluster

# Tests that ask the store: its queries run in threads, which virtual time refuses.
IN_REAL_TIME = {"test_turn_columns.py"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in IN_REAL_TIME:
        return {"real time": asyncio.new_event_loop}
    return {"virtual time": VirtualTimeLoop}


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("tests", wire=MemoryNetwork().wire("tests")) as system:
        yield system
    assert len(asyncio.all_tasks()) == 1, "a task outlived its system"


@pytest.fixture
def cluster(system: ActorSystem, tmp_path: Path) -> FakeCluster:
    return FakeCluster(system, tmp_path)
