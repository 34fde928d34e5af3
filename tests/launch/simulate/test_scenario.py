"""Scenarios: what they refuse, and the runs that they become."""

import re
from pathlib import Path

import pytest
import yaml

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.inference.engine_times import RooflineTimes
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.backend_config import SimulatedTrainerConfig
from flexmarl.actors.trainer.backends.trainer_times import TrainerTimes
from flexmarl.actors.trainer.pool.pool_config import SharedPoolConfig
from flexmarl.core.errors import FlexmarlError
from flexmarl.launch.hosts.placement.plan import DoesNotFit
from flexmarl.launch.simulate.devices import PRESETS
from flexmarl.launch.simulate.scenario import (
    model_shapes,
    read_scenario,
    scenario_file,
    simulated_config,
    simulated_job,
)

SCENARIO = Path(__file__).parent / "scenario.yaml"


def refusal(*overrides: str) -> str:
    with pytest.raises(FlexmarlError) as refused:
        simulated_config(read_scenario(SCENARIO, overrides))
    return str(refused.value)


def without(tmp_path: Path, *keys: str) -> Path:
    """The scenario without one of its keys."""
    raw = yaml.safe_load(SCENARIO.read_text())
    section = raw
    for key in keys[:-1]:
        section = section[key]
    del section[keys[-1]]
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


def simulated_parts(
    policy: str, *overrides: str
) -> tuple[SimulatedEngineConfig, RooflineTimes, SimulatedTrainerConfig, TrainerTimes]:
    """Engine and trainer of a policy, and their times."""
    section = simulated_config(read_scenario(SCENARIO, overrides)).policies[PolicyName(policy)]
    engine, trainer = section.engine, section.trainer
    assert isinstance(engine, SimulatedEngineConfig) and isinstance(trainer, SimulatedTrainerConfig)
    assert engine.times is not None
    return engine, engine.times, trainer, trainer.times_on(trainer.most_ranks)


def test_engines_and_trainers_get_the_times_of_the_cluster() -> None:
    _, fast, trainer, fast_trainer = simulated_parts("judge")
    _, slow, _, slow_trainer = simulated_parts("judge", "cluster.device=A100")
    assert fast.weights_s < slow.weights_s and fast_trainer.token_s < slow_trainer.token_s
    assert trainer.most_ranks == 2
    # A token has 2 layers of 2 heads of 64 for keys and for values, in bfloat16.
    assert fast.kv_tokens == 2**30 // (2 * 2 * 2 * 64 * 2)


def test_one_number_of_a_named_device_is_changed_by_a_setting() -> None:
    cluster = read_scenario(SCENARIO, ["cluster.device.memory_gib=60", "cluster.device.step_s=0.01"]).cluster
    assert cluster.device == PRESETS["H100"].model_copy(update={"memory_gib": 60.0, "step_s": 0.01})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "cluster.device.memory_gb=3",
            r"cluster.device.memory_gb: there is no such key \(value 3\); .* memory_gib",
        ),
        ("cluster.host=3", "cluster.host: there is no such key .* do you mean hosts"),
        (
            "workload.agents.solver.prompt.medium=3",
            "prompt.medium: there is .*; allowed: median, .*mean median",
        ),
        ("workload.calls=[{agent: solver, chanc: 1}]", "chanc: there is no such key .*; do you mean chance"),
        (
            "workload.agents.solver.answer=600",
            "solver.answer=600: needs a section of keys; there are: median, sigma",
        ),
        ("cluster.hosts=two", "cluster.hosts='two': Input should be a valid integer"),
    ],
)
def test_a_mistaken_key_or_value_is_refused_with_the_keys_that_there_are(override: str, words: str) -> None:
    assert re.search(words, refusal(override))


def test_hosts_without_room_for_the_published_weights_of_a_static_pool_are_refused_with_the_numbers() -> None:
    static = ("pool={name: static}", "agent_defaults.trainer.ranks=1", "cluster.host_memory_gib=0.001")
    words = refusal(*static)
    assert re.search(r"0\.\d GiB of cluster.host_memory_gib on \S+ are needed for published weights", words)
    simulated_config(read_scenario(SCENARIO, [*static, "cluster.host_memory_gib=0.1"]))


def test_answers_have_the_lengths_of_the_workload() -> None:
    engine, *_ = simulated_parts("solver", "workload.agents.solver.answer.median=60")
    assert (engine.median_tokens, engine.sigma, engine.max_context) == (60, 0.8, 4096)


def test_a_cluster_that_can_not_hold_the_run_is_refused_with_the_numbers() -> None:
    assert "the instances need 6 GPUs" in refusal("agents.solver.instances=5")
    shared = "instances and training need 5 devices, and cluster has 1 x 4: they would share 1"
    assert shared in refusal("agents.solver.instances=2")
    assert "GiB" in refusal("agent_defaults.engine.kv_cache_bytes=100000000000")


@pytest.mark.parametrize(
    ("overrides", "states", "words"),
    [
        (
            (),
            1,
            "pool.states_per_slot=1: 2 states need 97.2 GiB of each GPU, and 95% of 64.0 GiB may be used",
        ),
        (
            ("cluster.device.memory_gib=110",),
            2,
            "pool.states_per_slot=2: the next policy's state fits beside the present one",
        ),
        (
            ("cluster.device.memory_gib=110", "pool.states_per_slot=1"),
            1,
            "2 states would fit",
        ),
    ],
)
def test_a_simulation_plays_the_states_of_its_plan(
    overrides: tuple[str, ...], states: int, words: str
) -> None:
    job = simulated_job(read_scenario(scenario_file("merchant-assistant"), overrides))
    assert isinstance(job.config.pool, SharedPoolConfig)
    assert job.config.pool.states_per_slot == states and words in job.slot_states


def test_a_number_of_states_without_room_is_refused_as_that_of_a_real_run() -> None:
    with pytest.raises(
        DoesNotFit, match="97.2 GiB are needed on each GPU .*; pool.states_per_slot=auto, more"
    ):
        simulated_config(read_scenario(scenario_file("merchant-assistant"), ["pool.states_per_slot=2"]))


def test_a_gang_that_is_larger_than_its_pool_is_refused() -> None:
    text = refusal("trainer.ranks=3")
    assert "3" in text and "slots" in text, text


def test_a_device_without_numbers_is_refused_by_their_names() -> None:
    text = refusal("cluster.device={tflops: 100}")
    assert all(f"cluster.device.{key}: is missing" in text for key in ("memory_gib", "host_gb_s"))
    assert "cluster.device: there is no device 'H1'" in refusal("cluster.device=H1")


@pytest.mark.parametrize(
    "keys",
    [
        ("workload", "agents", "solver"),
        ("workload", "agents", "judge", "answer"),
        ("workload",),
        ("cluster",),
    ],
    ids=".".join,
)
def test_a_scenario_without_a_part_is_refused_by_its_key(tmp_path: Path, keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=keys[-1]):
        read_scenario(without(tmp_path, *keys), [])


def test_agents_that_share_a_policy_have_one_distribution_of_answers() -> None:
    text = refusal("agents.judge={policy: solver}")
    assert "workload.agents.solver.answer and workload.agents.judge.answer differ" in text


def test_engines_compute_the_part_of_the_prompts_that_the_workload_names() -> None:
    part = "workload.agents.solver.prompt.computed=0.25"
    engines = simulated_config(read_scenario(SCENARIO, [part])).policies
    assert {name: policy.engine.model_dump()["computed_share"] for name, policy in engines.items()} == {
        "solver": 0.25,
        "judge": 1.0,
    }
    answer = read_scenario(SCENARIO, []).workload.agents[AgentName("solver")].answer.model_dump()
    text = refusal("agents.judge={policy: solver}", f"workload.agents.judge.answer={answer}", part)
    assert (
        "workload.agents.solver.prompt.computed is 0.25 and that of judge 1, but both use policy 'solver'"
        in text
    )


def test_training_computes_the_part_of_the_tokens_that_the_workload_names() -> None:
    part = "workload.agents.solver.trained=0.5"
    whole, half = (
        simulated_config(read_scenario(SCENARIO, words)).policies[PolicyName("solver")].trainer.model_dump()
        for words in ([], [part])
    )
    for times, of_half in zip(whole["times"], half["times"], strict=True):
        assert of_half["token_s"] == times["token_s"] / 2 and of_half["pair_s"] == times["pair_s"] / 2
        assert of_half["tokens_per_forward"] == 2 * times["tokens_per_forward"]
    answer = read_scenario(SCENARIO, []).workload.agents[AgentName("solver")].answer.model_dump()
    text = refusal("agents.judge={policy: solver}", f"workload.agents.judge.answer={answer}", part)
    assert "workload.agents.solver.trained is 0.5 and that of judge 1, but both use policy 'solver'" in text


def test_a_folder_and_a_file_without_a_section_are_answered_by_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("agents: {}")
    with pytest.raises(ConfigError, match="is a folder, and a scenario a file: .*/config.yaml may be one"):
        scenario_file(str(tmp_path))
    with pytest.raises(ConfigError, match="no section cluster: .* such as 'cluster={hosts: 1"):
        read_scenario(tmp_path / "config.yaml", [])
    with pytest.raises(ConfigError, match="no section workload: .* or --from RUN_DIR"):
        read_scenario(tmp_path / "config.yaml", ["cluster={hosts: 1, devices: 1, device: H100}"])


def test_a_simulated_run_has_no_supervised_batches() -> None:
    config = simulated_config(read_scenario(SCENARIO, ["agent_defaults.sft.batches=50"]))
    assert {policy.sft.batches for policy in config.policies.values()} == {0}


def test_what_can_not_be_simulated_yet_is_refused() -> None:
    assert "policies.solver.lora" in refusal("agents.solver.lora={rank: 8}")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("merchant-assistant", [14.8] * 8),
        ("category-assistant", [14.8] * 3 + [32.8] * 2),
        ("fleet-5x32b", [32.8] * 5),
        ("fleet-3x32b-7x14b", [14.8] * 7 + [32.8] * 3),
        ("fleet-15x14b", [14.8] * 15),
    ],
)
def test_the_built_in_scenarios_have_the_papers_models_and_fit_their_clusters(
    name: str, parameters: list[float]
) -> None:
    scenario = read_scenario(scenario_file(name), ())
    shapes = model_shapes(scenario.config)
    assert sorted(round(shape.parameters / 1e9, 1) for shape in shapes.values()) == parameters
    assert simulated_config(scenario).training.micro_batch == 16


def test_an_unknown_scenario_is_refused_with_those_that_there_are() -> None:
    assert scenario_file("merchant-assistant").is_file() and scenario_file(str(SCENARIO)) == SCENARIO
    with pytest.raises(
        ConfigError,
        match=r"built in \(category-assistant, .*merchant-assistant.*\) .*do you mean merchant-assistant",
    ):
        scenario_file("merchant-asistant")


def test_a_scenario_without_steps_is_refused() -> None:
    assert refusal("training.steps=0") == (
        "training.steps=0: a simulation takes the time of steps: write 1 or more"
    )
