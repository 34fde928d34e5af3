"""Fixtures of simulated runs."""

import gc
from collections.abc import Iterator

import pytest

from flexmarl.core.base.collector import spare_collector


@pytest.fixture
def collector() -> Iterator[None]:
    """It runs rarely: a simulation makes few cycles, and the search for them takes a quarter of its time."""
    usual = gc.get_threshold()
    spare_collector()
    yield
    gc.unfreeze()
    gc.set_threshold(*usual)
