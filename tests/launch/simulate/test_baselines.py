"""Ways of training as configs of the same actors: what each row sets, what is refused, and the order of their times."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.simulate.baselines import BASELINES, in_mode
from flexmarl.launch.simulate.scenario import read_scenario, scenario_file, simulated_config
from flexmarl.launch.simulate.scenario_run import run_scenario

SCENARIO = Path(__file__).parent / "scenario.yaml"
ORDERINGS = Path(__file__).parent / "orderings.yaml"


def baseline(name: str, *overrides: str) -> RunConfig:
    return simulated_config(in_mode(read_scenario(SCENARIO, overrides), name))


def ranks_of(config: RunConfig) -> dict[str, int]:
    return {str(name): policy.trainer.most_ranks for name, policy in config.policies.items()}


@pytest.mark.parametrize("name", BASELINES)
def test_each_keeps_agents_batches_and_times_of_an_engine(name: str) -> None:
    plain, changed = baseline("flexmarl"), baseline(name)
    kept = {"barrier": "policy", "largest_micro_batch": plain.training.largest_micro_batch}
    assert changed.training.model_copy(update=kept) == plain.training
    assert changed.agents == plain.agents and changed.weights == plain.weights
    for policy, section in plain.policies.items():
        assert changed.policies[policy].engine == section.engine


@pytest.mark.parametrize("scenario", ["merchant-assistant", "category-assistant"])
def test_each_fits_the_hosts_of_the_papers_scenarios(scenario: str) -> None:
    for name in BASELINES:
        assert in_mode(read_scenario(scenario_file(scenario), ()), name).cluster.hosts == 8


def test_micro_batches_are_joined_in_ours_alone() -> None:
    joining = [
        name
        for name in BASELINES
        if baseline(name, "training.largest_micro_batch=8").training.largest_micro_batch
    ]
    assert joining == ["flexmarl", "without-balancing", "without-pipeline", "without-sharing"]


def test_pools_are_divided_as_the_rows_say() -> None:
    assert ranks_of(baseline("flexmarl")) == {"solver": 2, "judge": 2}
    assert ranks_of(baseline("marti")) == ranks_of(baseline("without-sharing")) == {"solver": 1, "judge": 1}
    assert ranks_of(baseline("distrl")) == {"solver": 2, "judge": 2}
    together = baseline("mas-rl")
    assert ranks_of(together) == {"solver": 2, "judge": 2}
    assert [policy.instances for policy in together.policies.values()] == [2, 2], "all four devices generate"
    assert in_mode(read_scenario(SCENARIO, ()), "mas-rl").hosts == 2, "the slots stand for the same devices"


def test_gangs_have_a_share_of_the_slots_in_ours_alone() -> None:
    sizes = (
        "agent_defaults.trainer.ranks=4",
        "trainer.min_ranks=1",
        "pool.slots=4",
        "training.micro_batch=2",
        "cluster.devices=16",
    )
    sharing = [
        name
        for name, row in BASELINES.items()
        if row.pool == "shared" and baseline(name, *sizes).policies[PolicyName("judge")].trainer.min_ranks
    ]
    assert sharing == ["flexmarl", "without-balancing", "without-pipeline"]
    assert ranks_of(baseline("flexmarl", *sizes)) == {"solver": 4, "judge": 4}
    assert ranks_of(baseline("flexmarl-paper", *sizes)) == {"solver": 2, "judge": 2}, "a rank for each sample"


def test_slots_of_its_own_are_in_proportion_to_a_policys_parameters() -> None:
    layers = "agents.solver.model.config.num_hidden_layers=12"
    config = baseline("marti", layers, "pool.slots=3", "cluster.devices=8")
    assert ranks_of(config) == {"solver": 2, "judge": 1}


def test_agents_in_turn_have_a_stage_for_each_call() -> None:
    stages = in_mode(read_scenario(SCENARIO, ()), "distrl").workload.calls
    assert [[call.agent for call in stage] for stage in stages] == [["solver"], ["solver"], ["judge"]]
    assert baseline("marti").data == baseline("flexmarl").data


def test_a_mode_that_the_scenario_can_not_have_is_refused_by_its_name_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="--mode marty: there is no such mode; .*marti"):
        baseline("marty")
    with pytest.raises(ConfigError, match=r"--mode marti \(.*\): 2 trained policies need .* pool.slots=1"):
        baseline("marti", "pool.slots=1", "trainer.ranks=1")
    with pytest.raises(ConfigError, match="--mode mas-rl .*pool.name=static"):
        baseline("mas-rl", "pool={name: static}", "trainer.ranks=1")
    large = (
        "agents.solver.model.config={model_type: qwen2, hidden_size: 5120, intermediate_size: 13824, "
        "num_hidden_layers: 48, num_attention_heads: 40, num_key_value_heads: 8, vocab_size: 152064}"
    )
    with pytest.raises(ConfigError, match="(?s)--mode marti .*GiB are needed"):
        baseline(
            "marti",
            large,
            "engine.kv_cache_bytes=1000000000",
            "trainer.ranks=8",
            "pool.slots=8",
            "cluster.devices=16",
            "agents.judge.trainer.ranks=2",
        )


@pytest.fixture(scope="module")
def step_s(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, float]:
    """Seconds of a step in each way, in virtual time."""
    folder, seconds = tmp_path_factory.mktemp("ways"), {}
    for name in BASELINES:
        seconds[name] = run_scenario(in_mode(read_scenario(ORDERINGS, ()), name), folder / name).step_s
    return seconds


def test_other_systems_take_longer_in_the_order_of_the_paper(step_s: Mapping[str, float]) -> None:
    ways = ("mas-rl", "distrl", "marti", "flexmarl")
    assert sorted(ways, key=lambda way: -step_s[way]) == [*ways], step_s
    assert step_s["marti"] > step_s["flexmarl-paper"], step_s


@pytest.mark.parametrize("ablation", ["without-balancing", "without-pipeline", "without-sharing"])
def test_each_part_that_is_missing_costs_time(step_s: Mapping[str, float], ablation: str) -> None:
    assert step_s[ablation] > 1.03 * step_s["flexmarl"], step_s
