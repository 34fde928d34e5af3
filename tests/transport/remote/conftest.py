"""An owner of states, and a reader on another host."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from flexmarl.transport.host_memory.block import CHUNK_BYTES
from flexmarl.transport.remote import fetch
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S
from .hosts import KEYS, Hosts


@pytest.fixture(params=[True, False], ids=["encrypted", "trusted"])
def bulk(request: pytest.FixtureRequest) -> Bulk:
    return Bulk("127.0.0.1", KEYS, encrypted=request.param)


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "RANGE_BYTES", CHUNK_BYTES)
    # An owner that a busy machine makes late is waited for: a connection that is made again costs bytes, which are
    # counted.
    monkeypatch.setattr(fetch, "_SILENCE_S", PATIENCE_S)


@pytest.fixture
def hosts(tmp_path: Path, small_ranges: None) -> Hosts:
    return Hosts(tmp_path)


@pytest.fixture
async def owner(hosts: Hosts, bulk: Bulk) -> AsyncIterator[StateTransport]:
    async with hosts.open("near", bulk) as transport:
        yield transport


@pytest.fixture
async def reader(hosts: Hosts, bulk: Bulk) -> AsyncIterator[StateTransport]:
    async with hosts.open("far", bulk) as transport:
        yield transport


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
