"""Fixtures of the trainer's tests."""

from collections.abc import Iterator

import pytest

from .backends.torch_policy.ranks import (
    Ranks,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks(4, tmp_path_factory.mktemp("gangs"))
    yield processes
    processes.close()
