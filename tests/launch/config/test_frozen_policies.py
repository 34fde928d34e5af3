"""Policies with ``train: false``: in the config, and in a run."""

import json
from pathlib import Path

import pytest
import yaml

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.launch.config.config_reading import check, resolve, resolve_mapping, to_yaml
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run.role_setups import orchestrator_plan, served_policies
from flexmarl.launch.simulate.simulation import Simulation, simulate

from ..conftest import TINY

RECIPE = Path(__file__).parents[1] / "recipes" / "self_play"
PLAYER, RIVAL = PolicyName("player"), PolicyName("rival")


def game(*overrides: str) -> RunConfig:
    return resolve(str(RECIPE), overrides)


def test_an_agent_with_train_false_has_a_frozen_policy() -> None:
    config = game()
    assert [*config.trained] == [PLAYER] and [*config.trained_agents] == ["player"]
    assert orchestrator_plan(config).policies == (PLAYER,)
    assert [*served_policies(config)] == [PLAYER, RIVAL], "it has instances like the other"


def test_a_frozen_policy_resolves_to_itself_without_keys_of_training() -> None:
    config = game()
    assert config.policies[PLAYER].optimizer.lr == 1e-3, "a default of all agents"
    written = yaml.safe_load(to_yaml(config))
    assert written["policies"]["rival"].keys().isdisjoint({"optimizer", "algorithm", "sft", "global_batch"})
    assert check(written, "again") == config == resolve_mapping(written, [], "again")[0]


def test_a_policy_of_the_section_policies_may_be_frozen() -> None:
    config = game("policies={house: {train: false}}", "agents.rival={policy: house}")
    assert [*config.trained] == [PLAYER] and config.policy_of(AgentName("rival")) == "house"
    assert check(yaml.safe_load(to_yaml(config)), "again") == config


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (["agents.rival.optimizer.lr=1.0e-3"], r"agents\.rival: optimizer is for policies that are trained"),
        (["agents.rival.optimizer={}"], r"agents\.rival: optimizer is for policies that are trained"),
        (["agents.rival.sft.batches=1"], r"agents\.rival: sft is for policies that are trained"),
        (["agents.rival.global_batch=1"], r"agents\.rival: global_batch is for policies that are trained"),
        (["agents.rival.algorithm.name=rloo"], r"agents\.rival: algorithm is for policies that are trained"),
        (
            ["agents.rival.columns.depth={type: int}"],
            r"agents\.rival\.columns\.depth: policy 'rival' has train=false, so that the agent has no samples",
        ),
        (["agents.player.train=false"], r"all policies have train=false: at least one has to be trained"),
        (
            ["agents.rival={policy: player, train: false}"],
            r"agents\.rival\.train: a setting of policy 'player'.* write agents\.player\.train",
        ),
    ],
)
def test_training_of_a_frozen_policy_is_refused_by_name(settings: list[str], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        game(*settings)


@pytest.mark.parametrize("slots", [1, "auto"])
def test_slots_without_a_policy_to_train_are_refused(slots: int | str) -> None:
    frozen = ["agents.player.train=false", "training.steps=0"]
    with pytest.raises(ConfigError, match=r"pool\.name=shared: .* leave the section pool out"):
        game(*frozen, f"pool={{name: shared, slots: {slots}}}")
    assert not game(*frozen).trained


def test_a_frozen_policy_has_no_trainer_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"agents\.checker: trainer is for policies that are trained"):
        resolve(str(TINY), ["agents.checker.train=false", "agents.checker.trainer.ranks=2"])
    config = resolve(str(TINY), ["agents.checker.train=false", "agent_defaults.trainer.ranks=1"])
    assert [*config.trained] == ["solver"]


# --------------------------------------------------------------------------- runs


def played(tmp_path: Path, *overrides: str) -> Simulation:
    made = simulate(game(*overrides), tmp_path / "run", 1)
    assert made.result is not None and made.result.last_step == 3
    return made


@pytest.mark.parametrize(
    "settings",
    [(), ("mode=async",), ("pool={name: shared, slots: 1}",), ("balance.scope=intra+inter",)],
    ids=str,
)
def test_a_frozen_agent_generates_and_only_the_other_is_trained(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    made = played(tmp_path, *settings)
    assert made.result is not None
    saved = Path(made.result.checkpoint)
    assert [folder.name for folder in saved.iterdir() if folder.is_dir()] == ["player"]
    trained = json.loads((saved / "player" / "simulated_policy.json").read_text())["trained"]
    assert [len(samples) for samples in trained.values()] == [6, 6, 6], "its own turns alone"
    steps = [json.loads(line) for line in made.directory.metrics.read_text().splitlines()]
    assert [step["turns/rival"] for step in steps] == [6, 6, 6]
    assert [step["reward/rival"] + step["reward/player"] for step in steps] == [0.0, 0.0, 0.0]
    assert [[*step["versions"]] for step in steps] == [["player"]] * 3
    assert made.result.evaluations[3]["rival_version"] == 0.0


def test_a_frozen_agent_needs_no_reward(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "config.yaml").write_text((RECIPE / "config.yaml").read_text())
    text = (RECIPE / "workflow.py").read_text()
    (recipe / "workflow.py").write_text(text.replace("player=won, rival=-won,", "player=won,"))
    made = simulate(resolve(str(recipe), []), tmp_path / "run", 1)
    assert made.result is not None and made.result.last_step == 3
    steps = [json.loads(line) for line in made.directory.metrics.read_text().splitlines()]
    assert [step["turns/rival"] for step in steps] == [6, 6, 6]


def test_a_frozen_policy_starts_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    made = played(tmp_path)
    first = made.directory.path
    config = resolve(str(RECIPE), [f"agents.rival.init_from={first}/2"])
    assert config.policies[RIVAL].init_from == first / "checkpoints" / "step_000002" / "player"
    with pytest.raises(ConfigError, match=r"agents\.rival\.init_from.*there is no such run"):
        game(f"agents.rival.init_from={tmp_path}/nothing")
    for_all = resolve(str(RECIPE), [f"init_from={first}/2"])
    assert for_all.policies[RIVAL].init_from is None, "it would play the trained policy of the other run"
    assert for_all.policies[PLAYER].init_from == first / "checkpoints" / "step_000002" / "player"
    again = simulate(config, tmp_path / "again", 1)
    assert again.result is not None and again.result.last_step == 3
