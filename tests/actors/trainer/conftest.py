"""Fixtures of the trainer's tests."""

from collections.abc import Iterator

import pytest

from .backends.torch_policy.ranks import (
    Ranks,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    processes = Ranks(4)
    yield processes
    processes.close()
