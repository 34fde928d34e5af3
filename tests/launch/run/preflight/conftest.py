"""Fixtures of the tests that load recipes in this process."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def forgotten_recipes() -> Iterator[None]:
    """Forgets the modules of recipes: the next one of the same name is another."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("flexmarl_recipe"):
            del sys.modules[name]
