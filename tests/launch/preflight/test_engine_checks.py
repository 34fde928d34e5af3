"""Engines whose package is missing are refused before anything starts."""

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig
from flexmarl.launch.config_reading import resolve, resolve_written
from flexmarl.launch.preflight.engine_checks import engine_problems
from flexmarl.launch.preflight.preflight import check_before_start

from ..conftest import SIMULATED, TINY


def test_installed_packages_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*engine_problems(resolve(str(TINY), []))] == []
    monkeypatch.setattr(EmbeddedEngineConfig, "package", "pytest")
    assert [*engine_problems(resolve(str(TINY), []))] == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EmbeddedEngineConfig, "package", "no_such_package")
    monkeypatch.setattr(EmbeddedEngineConfig, "install", "pip install 'flexmarl[none]'")
    config, keys = resolve_written(str(TINY), ["engine.name=embedded"])
    with pytest.raises(ConfigError) as refused:
        check_before_start(config, keys)
    _, *problems = str(refused.value).splitlines()
    assert problems == [
        "  engine.name=embedded: the package no_such_package is not installed: pip install 'flexmarl[none]'"
    ]
    assert [*engine_problems(resolve(str(TINY), SIMULATED))] == []
