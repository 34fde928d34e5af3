"""One policy on one rank: the files of ``TorchPolicy.save``, and continuing from them bit for bit."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import CheckpointIncomplete, CheckpointMismatch
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.saved_policy import STATE_FILE
from flexmarl.actors.trainer.trainer_config import OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from ...algorithm import advantage
from .policies import MODEL


def make_policy(seed: int = 0, **model: Any) -> TorchPolicy:
    return TorchPolicy(
        PolicyName("solver"),
        PolicySetup(
            model=ModelConfig(config=MODEL | model, tokenizer="unused"),
            credit={AgentName("solver"): CreditConfig()},
            optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=3),
        ),
        seed=seed,
        total_steps=8,
    )


def step(policy: TorchPolicy) -> float:
    """One step on samples that depend on the version only; its learning rate."""
    rng = random.Random(policy.version)
    rewards = (0.0, 1.0, 1.0, 0.5)
    for index, reward in enumerate(rewards):
        tokens = tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9)))
        sample = Sample(
            sample_id=f"q0_0_{index}",
            agent="solver",
            step=policy.version,
            policy_version=policy.version,
            group="q0",
            reward=reward,
            advantage=advantage(reward, rewards),
            prompt_tokens=(1, 2, 3),
            tokens=tokens,
            logprobs=(-2.8,) * len(tokens),
        )
        policy.accumulate([sample])
    return policy.optimizer_step().figures["lr"]


def full_state(policy: TorchPolicy) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in {**policy.weights(), **policy.models.files()[STATE_FILE]}.items()}


def assert_equal_state(first: TorchPolicy, second: TorchPolicy) -> None:
    left, right = full_state(first), full_state(second)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert first.version == second.version


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate("0123456789=?$^# ")}
    make: Any = PreTrainedTokenizerFast  # its constructor has no types
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="#")), unk_token="#", eos_token="$"
    )
    return tokenizer


@pytest.mark.parametrize("model", [{}, {"tie_word_embeddings": True}, {"attention_dropout": 0.2}])
def test_going_on_from_a_folder_is_bit_equal_to_not_having_stopped(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, model: dict[str, Any]
) -> None:
    unbroken = make_policy(**model)
    for _ in range(2):
        step(unbroken)
    unbroken.save(tmp_path / "solver", tokenizer)

    resumed = make_policy(seed=99, **model)
    torch.rand(5)  # another policy drawing from the global stream must not matter
    resumed.load(tmp_path / "solver")
    assert_equal_state(unbroken, resumed)
    for _ in range(4):  # across the end of the schedule's SFT
        assert step(unbroken) == step(resumed)
        assert_equal_state(unbroken, resumed)
    assert unbroken.version == 6


def test_saving_changes_nothing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    saving, plain = make_policy(), make_policy()
    for index in range(3):
        step(saving)
        step(plain)
        saving.save(tmp_path / str(index), tokenizer)
    assert_equal_state(saving, plain)


def test_forcing_it_to_the_disk_is_left_to_who_commits_the_whole_checkpoint(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", forced.append)
    make_policy().save(tmp_path, tokenizer)
    assert forced == []


def test_all_files_are_readable_as_the_umask_says(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    before = os.umask(0o027)
    try:
        make_policy().save(tmp_path / "solver", tokenizer)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "solver").iterdir()}
    assert modes == dict.fromkeys(modes, oct(0o640)) and "model.safetensors" in modes


def test_a_fresh_policy_can_be_saved_and_loaded(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    fresh, other = make_policy(), make_policy(seed=1)
    fresh.save(tmp_path, tokenizer)
    other.load(tmp_path)
    assert_equal_state(fresh, other)


def test_loading_drops_what_was_accumulated(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    policy = make_policy()
    policy.save(tmp_path, tokenizer)
    policy.accumulate([Sample("q_0_0", "solver", 0, 0, "q", 1.0, 0.5, (1,), (2, 3), (-2.0, -2.0))])
    policy.load(tmp_path)
    stats = policy.optimizer_step()
    assert (stats.samples, stats.figures["grad_norm"]) == (0, 0.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_the_auto_classes_load_the_folder(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, tied: bool
) -> None:
    policy = make_policy(tie_word_embeddings=tied)
    step(policy)
    policy.save(tmp_path, tokenizer)

    auto_model: Any = AutoModelForCausalLM
    model, report = auto_model.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, policy.model.eval()(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_a_policy_starts_from_a_saved_folder_as_from_any_model(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    trained = make_policy()
    step(trained)
    trained.save(tmp_path, tokenizer)
    started = TorchPolicy(
        PolicyName("solver"),
        PolicySetup(model=ModelConfig(path=str(tmp_path)), credit={AgentName("solver"): CreditConfig()}),
        seed=5,
        total_steps=8,
    )
    assert started.version == 0
    assert all(torch.equal(t, trained.weights()[name]) for name, t in started.weights().items())


def test_nothing_in_the_folder_is_a_pickle(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    make_policy().save(tmp_path, tokenizer)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= files
    assert {"training_state.safetensors", "training_state.json"} <= files
    assert {Path(name).suffix for name in files} <= {".json", ".safetensors", ".jinja"}


# --------------------------------------------------------------------------- folders that do not fit


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.safetensors", "training_state.json"])
@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_damaged_file_is_named_and_the_policy_unchanged(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str, damage: str
) -> None:
    make_policy(seed=1).save(tmp_path, tokenizer)
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-7])
    policy, untouched = make_policy(), make_policy()
    with pytest.raises(CheckpointIncomplete, match=name) as caught:
        policy.load(tmp_path)
    assert caught.value.path == path
    assert_equal_state(policy, untouched)


def test_another_models_folder_is_refused_naming_tensor_and_shapes(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    make_policy(intermediate_size=96).save(tmp_path, tokenizer)
    policy, untouched = make_policy(), make_policy()
    words = r"model\.safetensors.*gate_proj.*\[128, 64\].*\[96, 64\]"
    with pytest.raises(CheckpointMismatch, match=words):
        policy.load(tmp_path)
    assert_equal_state(policy, untouched)


def test_a_deeper_models_folder_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    make_policy(num_hidden_layers=2).save(tmp_path, tokenizer)
    with pytest.raises(CheckpointMismatch, match=r"model\.layers\.1\."):
        make_policy().load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("format", 1), ("version", -1), ("version", "3"), ("version", None)]
)
def test_a_position_that_makes_no_sense_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, key: str, value: Any
) -> None:
    make_policy().save(tmp_path, tokenizer)
    path = tmp_path / "training_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointMismatch, match=f"training_state.json: {key}"):
        make_policy().load(tmp_path)
