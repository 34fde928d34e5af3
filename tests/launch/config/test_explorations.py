"""Policies that explore: in the config, and in simulated runs."""

from pathlib import Path

import pytest
import yaml

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig
from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import check, resolve, resolve_mapping, to_yaml
from flexmarl.launch.config.evaluation_config import evaluation_config
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run.role_setups import orchestrator_plan, served_policies

from ..conftest import TINY

SOLVER, CHECKER, SCOUT = PolicyName("solver"), PolicyName("checker"), PolicyName("scout")
EXPLORED = "rollout.explorations={count: 8}"
SCOUTED = "policies={scout: {explores: solver, engine: {quantization: int8}, instances: 2}}"


def resolved(*overrides: str) -> RunConfig:
    return resolve(str(TINY), overrides)


def test_an_explorer_has_the_model_and_the_engine_of_its_policy_but_for_what_it_writes() -> None:
    config = resolved(EXPLORED, SCOUTED, "engine={max_batch: 5}")
    scout, solver = config.policies[SCOUT], config.policies[SOLVER]
    assert (scout.model, scout.train, scout.instances) == (solver.model, False, 2)
    assert isinstance(scout.engine, EmbeddedEngineConfig) and scout.engine.quantization == "int8"
    assert scout.engine.max_batch == solver.engine.max_batch == 5
    assert config.explorers == config.followers == {SOLVER: SCOUT}
    assert [*config.trained] == [SOLVER, CHECKER] and not config.frozen, (
        "it has no weights of its own to publish"
    )
    assert orchestrator_plan(config).policies == (SOLVER, CHECKER)
    assert [*served_policies(config)] == [SCOUT, SOLVER, CHECKER]


def test_it_resolves_to_itself_and_is_not_there_in_evaluations(tmp_path: Path) -> None:
    config = resolved(EXPLORED, SCOUTED)
    written = yaml.safe_load(to_yaml(config))
    assert check(written, "again") == config == resolve_mapping(written, [], "again")[0]
    exported = tmp_path / "model"
    exported.mkdir()
    (exported / "config.json").write_text("{}")
    evaluated = evaluation_config(exported, str(TINY), [EXPLORED, SCOUTED], None)
    assert [*evaluated.policies] == [SOLVER, CHECKER] and evaluated.rollout.explorations is None


def test_an_explorer_with_a_model_of_its_own_is_a_frozen_policy() -> None:
    small = "model: {tokenizer: tokenizer, config: {model_type: qwen3, hidden_size: 16}}"
    config = resolved(EXPLORED, f"policies={{scout: {{explores: solver, {small}}}}}")
    assert config.policies[SCOUT].model != config.policies[SOLVER].model
    assert config.explorers == {SOLVER: SCOUT} and not config.followers and [*config.frozen] == [SCOUT]


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (
            [SCOUTED],
            r"policies\.scout\.explores='solver': the run has no explorations: write rollout\.explorations",
        ),
        (
            [EXPLORED, "policies={scout: {explores: sover}}"],
            r"explores='sover': there is no such policy; there are: ",
        ),
        (
            [EXPLORED, "policies={a: {explores: solver}, b: {explores: solver}}"],
            r"policies\.a\.explores='solver': another policy explores it too",
        ),
        ([EXPLORED, SCOUTED, "agents.solver.train=false"], r"explores='solver': that policy is not trained"),
        (
            [EXPLORED, SCOUTED, "agents.checker={policy: scout}"],
            r"agents\.checker\.policy='scout': that policy explores",
        ),
        (
            [EXPLORED, "policies={scout: {explores: solver, train: true}}"],
            r"train=true: an explorer is not trained",
        ),
        (
            [
                EXPLORED,
                "policies={scout: {explores: solver, model: {tokenizer: bytes, config: {model_type: qwen3}}}}",
            ],
            r"explores='solver': its tokenizer 'bytes' is another than the policy's",
        ),
        (
            ["rollout.explorations={count: 4}"],
            r"explorations\.count=4: 4 of them are played again .* write more",
        ),
        (["rollout.explorations={}"], r"rollout\.explorations\.count: .*missing"),
        (
            ["rollout.explorations={count: 8, skip_equal: true}"],
            r"explorations\.skip_equal=true needs replacement_queries",
        ),
        (
            [EXPLORED, "agents.solver.columns.reward={type: float, required: true, written_by: external}"],
            r"rollout\.explorations: agents\.solver\.columns\.reward has rewards from outside the run",
        ),
        (
            ["agents.solver.engine.quantization=int8"],
            r"agents\.solver: engine\.quantization=int8: it would generate with other weights than those that are "
            r"trained",
        ),
        (
            [EXPLORED, "policies={scout: {explores: solver, engine: {quantization: int4}}}"],
            r"quantization='int4'",
        ),
        (
            [EXPLORED, SCOUTED, "rollout.demonstrations={file: f}"],
            r"rollout\.explorations and rollout\.demonstrations: both decide",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings: list[str], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        resolved(*settings)
