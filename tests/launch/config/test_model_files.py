"""``init_from``: a policy starts from the weights of another run, which are checked before anything starts."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import CheckpointMismatch, ConfigError
from flexmarl.actors.json_files import read_json, write_json
from flexmarl.actors.messages import LoraConfig
from flexmarl.actors.model_sources import load_tokenizer
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.completion_model import placed_model
from flexmarl.actors.trainer.backends.torch_policy.merged_model import write_merged
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_config import LossConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.launch.cli.main import main
from flexmarl.launch.config.config_reading import check, read_yaml, resolve, to_yaml
from flexmarl.launch.errors import RunDirectoryError
from flexmarl.launch.run.role_setups import policy_setups
from flexmarl.launch.run_folder.export import export
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ..cli.runs import make_run, save_checkpoint
from ..conftest import REPRODUCIBLE, TINY
from ..in_process import RunsHere

torch.set_num_threads(1)
SIMULATED = ("engine.name=simulated", "trainer.name=simulated")


LORA = LoraConfig(rank=2)


def tiny_policy(seed: int, **options: Any) -> TorchPolicy:
    model = resolve(str(TINY), []).policies[PolicyName("solver")].real_model
    setup = PolicySetup(model=model, credit={AgentName("solver"): CreditConfig()}, **options)
    return TorchPolicy(PolicyName("solver"), setup, seed=seed, total_steps=3)


def save(seed: int, folder: Path) -> None:
    policy = tiny_policy(seed)
    policy.save(folder, load_tokenizer(policy._setup.real_model))


def make_tiny_run(path: Path) -> RunDirectory:
    """With checkpoints of steps 2 and 4, of the policies solver and checker."""
    directory = make_run(path)
    for step in (2, 4):
        policies = {"solver": partial(save, 10 * step), "checker": partial(save, 10 * step + 1)}
        save_checkpoint(directory, step, policies)
    return directory


def save_adapter(seed: int, folder: Path) -> None:
    policy = tiny_policy(seed, lora=LORA)
    policy.sft([((1, 2), (3, 4))])
    policy.save(folder, load_tokenizer(policy._setup.real_model))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run whose policy solver is an adapter."""
    directory = make_run(tmp_path_factory.mktemp("runs") / "adapters")
    save_checkpoint(directory, 2, {"solver": partial(save_adapter, 3)})
    return directory


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "first")


def test_every_policy_takes_the_one_of_its_name_in_the_newest_checkpoint(first: RunDirectory) -> None:
    config = resolve(str(TINY), [f"init_from={first.path}"])
    found = {name: policy.init_from for name, policy in config.policies.items()}
    assert found == {name: first.checkpoints / "step_000004" / name for name in ("solver", "checker")}
    assert check(read_yaml_of(to_yaml(config), first.path.parent), "config.yaml") == config
    setups = policy_setups(config)
    assert setups[PolicyName("solver")].init_from == found[PolicyName("solver")]


def read_yaml_of(text: str, folder: Path) -> dict[str, Any]:
    (folder / "resolved.yaml").write_text(text)
    return read_yaml(folder / "resolved.yaml")


def test_a_step_and_a_single_policy(first: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(first.path.parent)
    config = resolve(str(TINY), ["agents.checker.init_from=first/2"])
    assert config.policies[PolicyName("solver")].init_from is None
    assert config.policies[PolicyName("checker")].init_from == first.checkpoints / "step_000002" / "checker"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["init_from=nowhere"], "^init_from='nowhere': there is no such run: write RUN_DIR"),
        (["init_from=first/3"], "has no checkpoint of step 3; there are: 2, 4"),
        (["init_from=notes"], "notes is not a run directory"),
        (
            ["agents={other: {}, checker: {}}", "agents.other.init_from=first", "data.shape=alone"],
            "agents.other.init_from='first': .* has no policy 'other'; there are: checker, solver",
        ),
        (
            ["agents.solver.init_from=first", "agents.solver.model.config.hidden_size=64"],
            "init_from of policy solver does not fit its model: .*model.safetensors: .*64",
        ),
        (
            [*SIMULATED, "init_from=first"],
            "init_from of policy solver: its model is simulated, and the one in .*/solver is not",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    first: RunDirectory, monkeypatch: pytest.MonkeyPatch, settings: list[str], problem: str
) -> None:
    monkeypatch.chdir(first.path.parent)
    (first.path.parent / "notes").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=problem):
        resolve(str(TINY), settings)


def test_a_policy_starts_from_an_adapter(adapters: RunDirectory) -> None:
    settings = ["seed=3", f"agents.solver.init_from={adapters.path}", "agents.solver.lora={rank: 2}"]
    config = resolve(str(TINY), settings)
    policy = config.policies[PolicyName("solver")]
    assert policy.init_from == adapters.checkpoints / "step_000002" / "solver" and policy.lora == LORA


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["agents.solver.init_from={adapters}"], "solver holds a LoRA adapter: add the section `lora`"),
        (
            ["agents.solver.init_from={first}", "agents.solver.lora={{}}"],
            "solver holds a whole model, and the policy is a LoRA adapter: to adapt that model, write `model:",
        ),
        (
            ["agents.solver.init_from={adapters}", "agents.solver.lora={{rank: 4}}"],
            "init_from of policy solver does not fit its model: .*adapter_config.json: r: ",
        ),
        (
            ["agents.solver.init_from={adapters}", "agents.solver.lora={{rank: 2, targets: [q_proj]}}"],
            "init_from of policy solver does not fit its model: .*adapter_model.safetensors: ",
        ),
        (
            ["seed=4", "agents.solver.init_from={adapters}", "agents.solver.lora={{rank: 2}}"],
            "policy solver: its adapter is over other random weights .* seed=4 .*: write the seed and the model",
        ),
        (
            [*SIMULATED, "agents.solver.init_from={adapters}"],
            "init_from of policy solver: its model is simulated, and the one in .*/solver is not",
        ),
    ],
)
def test_an_adapter_is_no_whole_model(
    first: RunDirectory, adapters: RunDirectory, settings: list[str], problem: str
) -> None:
    filled = [
        one.format(first=first.path, adapters=adapters.path) if "init_from" in one or "lora" in one else one
        for one in settings
    ]
    with pytest.raises(ConfigError, match=problem):
        resolve(str(TINY), filled)


def test_an_adapter_is_exported_for_peft_or_as_a_whole_model(adapters: RunDirectory, tmp_path: Path) -> None:
    policy = tiny_policy(3, lora=LORA)
    policy.load(adapters.checkpoints / "step_000002" / "solver")
    export(adapters, "solver", None, tmp_path / "adapter")
    export(adapters, "solver", None, tmp_path / "whole", merged=True)
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"model.safetensors", "training_state.json", "training_state.safetensors"}
    assert not {path.name for path in (tmp_path / "whole").iterdir()} & {
        "adapter_config.json", "adapter_model.safetensors", "training_state.json"
    }  # fmt: skip
    row = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = policy.model(input_ids=row).logits
        base = placed_model(policy._setup.real_model, 0)
        base.load_state_dict(dict(policy.frozen_state()))
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert torch.equal(adapted(input_ids=row).logits, expected)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
        assert torch.allclose(whole(input_ids=row).logits, expected, atol=1e-5)


def test_only_an_adapter_over_its_own_base_is_merged(
    first: RunDirectory, adapters: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(RunDirectoryError, match="policy solver of .* is a whole model: leave out --merged"):
        export(first, "solver", None, tmp_path / "whole", merged=True)
    saved = adapters.checkpoints / "step_000002" / "solver" / "training_state.json"
    about = read_json(saved)
    target = tmp_path / "changed"
    shutil.copytree(saved.parent, target)
    write_json(target / saved.name, about | {"base": about["base"] | {"seed": 4}})
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointMismatch, match="base"):
        write_merged(target, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_damaged_file_is_named(first: RunDirectory, tmp_path: Path) -> None:
    damaged = make_tiny_run(tmp_path / "damaged")
    path = damaged.checkpoints / "step_000004" / "solver" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"^init_from=.*model.safetensors: is damaged"):
        resolve(str(TINY), [f"init_from={damaged.path}"])


def test_a_policy_starts_from_the_weights_alone(first: RunDirectory) -> None:
    folder = first.checkpoints / "step_000004" / "solver"
    policy = tiny_policy(1, loss=LossConfig(kl_coefficient=0.1))
    policy.start_from(folder)
    saved = load_file(folder / "model.safetensors")
    assert policy.version == 0
    assert {name: tensor.tolist() for name, tensor in policy.weights().items()} == {
        name: tensor.tolist() for name, tensor in saved.items()
    }
    assert policy.models.reference is not None
    reference = policy.models.reference.model.state_dict()
    assert all(torch.equal(reference[name], tensor) for name, tensor in saved.items())


def test_a_run_starts_from_another_and_an_export_of_it_generates(runs_here: RunsHere) -> None:
    """Whole runs: the evaluation before training equals the last one of the other run."""
    whole = runs_here.train("first", *REPRODUCIBLE)
    no_sft = "agent_defaults.sft.batches=0"
    run = runs_here.train("second", f"init_from={whole.directory}", *REPRODUCIBLE, no_sft, "training.steps=1")
    assert whole.status == run.status == 0, f"{whole.text}{run.text}"
    evaluations = [[event for event in each.events if event["event"] == "evaluated"] for each in (whole, run)]
    figures = [
        {key: value for key, value in event.items() if key not in ("time", "step", "eval_s")}
        for event in (evaluations[0][-1], evaluations[1][0])
    ]
    assert figures[0] == figures[1]
    target = runs_here.runs / "exported"
    assert main(["export", str(whole.directory), "solver", str(target), "--step", "4"]) == 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    model, info = loaded
    tokens = AutoTokenizer.from_pretrained(target)("1+1", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()
    assert not info["missing_keys"] and not info["unexpected_keys"]
    exported, saved = (
        load_file(folder / "model.safetensors")
        for folder in (target, whole.directory / "checkpoints" / "step_000004" / "solver")
    )
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
