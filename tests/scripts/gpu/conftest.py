"""The battery's tests on the CPU."""

from pathlib import Path

import pytest

from scripts.gpu.checks import Card


@pytest.fixture
def card(tmp_path: Path) -> Card:
    folder = tmp_path / "battery"
    folder.mkdir(mode=0o700)
    return Card("cpu", folder)
