"""Fixtures of the tests of the rollout actor."""

from pathlib import Path

import pytest

from flexmarl.core.system import ActorSystem

from .house import House


@pytest.fixture
def house(system: ActorSystem, tmp_path: Path) -> House:
    return House(system, tmp_path)
