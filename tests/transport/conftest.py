"""Two transports of one runtime directory: one that sets, one that reads."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flexmarl.transport.state import StateTransport


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(tmp_path) as opened:
        yield opened


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(tmp_path) as opened:
        yield opened
