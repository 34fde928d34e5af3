"""Hosts that exchange states, for tests: all are this one.

A reader of another host has another directory. A ``Link`` stands between it and the owner.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flexmarl.core import Keys
from flexmarl.transport.handle import StateHandle, TcpSource
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.remote.remote import LOCK_FILE
from flexmarl.transport.state import StateTransport
from flexmarl.transport.statistics import NetworkStatistics

from .link import Link

KEYS = Keys.make()
ELEMENTS = 3 << 20  # float32: 12 chunks
SIZE = 4 * ELEMENTS


class Hosts:
    """Transports on hosts, each of which has a directory."""

    def __init__(self, base: Path) -> None:
        self._base = base

    @asynccontextmanager
    async def open(self, host: str, bulk: Bulk | None) -> AsyncIterator[StateTransport]:
        directory = self._base / host
        directory.mkdir(mode=0o700, exist_ok=True)
        async with StateTransport(directory, bulk=bulk) as transport:
            yield transport
        assert {path.name for path in directory.iterdir()} <= {LOCK_FILE} or host in self.shared

    shared: tuple[str, ...] = ("far",)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.rand(ELEMENTS - 1, generator=generator), "b": torch.rand(1, generator=generator)}


def network(transport: StateTransport) -> NetworkStatistics:
    found = transport.statistics().network
    assert found is not None
    return found


def source_of(handle: StateHandle) -> TcpSource:
    source = handle.source("tcp")
    assert isinstance(source, TcpSource)
    return source


def through(handle: StateHandle, address: str) -> StateHandle:
    """The handle, with another address of its owner."""
    return replace(handle, sources=(replace(source_of(handle), address=address),))


@asynccontextmanager
async def link_to(handle: StateHandle) -> AsyncIterator[tuple[Link, StateHandle]]:
    async with Link(source_of(handle).address) as link:
        yield link, through(handle, link.address)


async def same(transport: StateTransport, handle: StateHandle, expected: dict[str, Any]) -> bool:
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    await transport.get(handle, into=into)
    return all(torch.equal(into[name], tensor) for name, tensor in expected.items())
