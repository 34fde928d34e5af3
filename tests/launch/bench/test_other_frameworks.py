import importlib.util

import pytest

from flexmarl.launch.bench import other_frameworks
from flexmarl.launch.hosts import env


async def test_a_library_that_is_not_installed_is_none() -> None:
    assert await other_frameworks.measure("no_such_library", 0.1, 10, env.actor_environment()) is None


async def test_a_library_that_does_not_work_says_why() -> None:
    # json can be imported, but has no actors
    assert await other_frameworks.measure("json", 0.1, 10, env.actor_environment()) == {
        "error": "KeyError: 'json'"
    }


async def test_a_library_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_frameworks, "_TIMEOUT_S", 0.01)  # python itself takes longer to start
    assert await other_frameworks.measure("json", 0.1, 10, env.actor_environment()) == {
        "error": "did not end within 0.01 s"
    }


@pytest.mark.skipif(importlib.util.find_spec("xoscar") is None, reason="needs flexmarl[bench]")
async def test_xoscar() -> None:
    figures = await other_frameworks.measure("xoscar", 0.1, 10, env.actor_environment())
    assert figures is not None and figures["calls_per_s"] > 100
