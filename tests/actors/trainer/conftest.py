"""Fixtures of the trainer's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .backends.torch_policy.ranks import (
    Ranks,
)
from .forks import SERVER


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.path.is_relative_to(Path(__file__).parent) for item in session.items):
        SERVER.open()


def pytest_unconfigure() -> None:
    SERVER.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    processes = Ranks(4)
    yield processes
    processes.close()
