"""Mistakes are named by the keys that were written."""

from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.written_config import UNCHANGED, WrittenConfig

from ..conftest import TINY

WRITTEN = WrittenConfig.model_validate(
    {
        "agents": {
            "a": {"model": {"path": "x"}},
            "b": None,
            "c": {"policy": {"pool_of": "a", "every": 2}},
            "d": {"policy": "a@3"},
        },
        "policies": {"p": {"optimizer": {"lr": 1}}, "q": {"pool_of": {"policy": "a"}}},
        "agent_defaults": {"model": {"dtype": "float32"}, "optimizer": {"lr": 2, "betas": [1, 2]}},
        "trainer": {"ranks": 2},
        "init_from": "runs/first",
    }
)


@pytest.mark.parametrize(
    ("location", "written"),
    [
        ("policies.a.model.path", "agents.a.model.path"),
        ("policies.a.model.dtype", "agent_defaults.model.dtype"),
        ("policies.b.model", "agent_defaults.model"),
        ("policies.p.optimizer.lr", "policies.p.optimizer.lr"),
        ("policies.p.optimizer.betas.1", "agent_defaults.optimizer.betas.1"),
        ("agents.b.sampling.temperature", "agents.b.sampling.temperature"),
        ("training.steps", "training.steps"),
        ("policies.a", "agents.a"),
        ("policies.p.trainer.ranks", "trainer.ranks"),
        ("policies.b.init_from", "init_from"),
        ("policies.c.pool_of", "agents.c.policy"),
        ("policies.c.pool_of.policy", "agents.c.policy.pool_of"),
        ("agents.c.pool_of.every", "agents.c.policy.every"),
        ("policies.d.pool_of.policy", "agents.d.policy"),
        ("policies.q.pool_of.policy", "policies.q.pool_of.policy"),
    ],
)
def test_a_key_is_the_place_of_its_value(location: str, written: str) -> None:
    assert WRITTEN.key(*location.split(".")) == written
    assert WRITTEN.in_text(f"({location}=3: no)") == f"({written}=3: no)"


def test_a_key_in_a_remedy_is_one_that_can_be_written() -> None:
    assert (
        WRITTEN.in_text("write policies.b.model.dtype or policies.p.x")
        == "write agents.b.model.dtype or policies.p.x"
    )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["agent_defaults.sampling.temperatur=1"],
            "agent_defaults.sampling.temperatur: there is no such key (value 1); allowed: temperature, top_k, ",
        ),
        (
            ["agent_defaults.optimizer.lr=-1"],
            "agent_defaults.optimizer.lr=-1: Input should be greater than 0",
        ),
        (["agents.solver.optimizer.lr=-1"], "agents.solver.optimizer.lr=-1: Input should be greater than 0"),
        (["agent_defaults.global_batch=2"], "agent_defaults.global_batch=2 is for mode=async"),
        (["agent_defaults.model.path=x"], "agent_defaults.model: give exactly one of `path`"),
        (
            ["agent_defaults.model.tokenizer=/no/x"],
            "agent_defaults.model.tokenizer='/no/x': there is no such file or folder",
        ),
    ],
)
def test_a_mistake_in_agent_defaults_is_reported_once_and_as_such(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(str(TINY), overrides)
    text = str(refused.value)
    assert problem in text
    assert text.count("lr=-1") + text.count("temperatur:") <= 1 and "checker" not in text


def test_a_resolved_config_has_its_own_keys(tmp_path: Path) -> None:
    assert UNCHANGED.key("policies", "solver", "model", "path") == "policies.solver.model.path"
