"""A micro-batch waits for the device once, however many forwards it has."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flexmarl.actors import truncated_scores
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Truncation
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.torch_policy import completion_model
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_config import LossConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .policies import SMALLER_MODEL, make_samples
from .waits import counted_waits

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},  # a mean over each sequence
    "dapo with a KL in the loss": {"name": "dapo", "kl_coefficient": 0.1},
    "gspo": {"name": "gspo"},
    "cispo": {"name": "cispo"},
    "ppo with a KL in the rewards": {"name": "ppo", "kl_coefficient": 0.1},
}


def make_policy(algorithm: dict[str, Any], tokens_per_forward: int) -> TorchPolicy:
    credit = CreditConfig(name="ppo") if algorithm["name"] == "ppo" else CreditConfig()
    setup = PolicySetup(
        model=ModelConfig(config=SMALLER_MODEL, tokenizer="unused"),
        credit={AgentName("solver"): credit},
        loss=LossConfig.model_validate(algorithm),
        trainer=TorchTrainerConfig(tokens_per_forward=tokens_per_forward, activation_checkpointing=True),
    )
    return TorchPolicy(PolicyName("solver"), setup, seed=0, total_steps=1)


def waits_of(algorithm: dict[str, Any], tokens_per_forward: int, cut: Truncation | None) -> list[str]:
    samples = [replace(sample, truncation=cut) for sample in make_samples(0)]
    samples[0] = replace(samples[0], temperature=0.5)
    policy = make_policy(algorithm, tokens_per_forward)
    with counted_waits() as waits:
        policy.accumulate(samples)
    return waits


@pytest.mark.parametrize(
    "cut", [None, Truncation(top_k=5), Truncation(top_k=5, top_p=0.8), Truncation(min_p=0.1)]
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_micro_batch_reads_the_device_once(
    name: str, cut: Truncation | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several chunks of the head, too.
    monkeypatch.setattr(completion_model, "most_logits_bytes", lambda _device: 4 * 16 * 5)
    for tokens_per_forward in (1000, 20):
        waits = waits_of(ALGORITHMS[name], tokens_per_forward, cut)
        assert len(waits) == 1 and waits[0].startswith("tolist"), waits


def test_a_share_of_the_probability_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts one wait for a forward of the head, since the number of tokens that ``top_p`` leaves is in the scores, and
    none for its repetition in the backward."""
    monkeypatch.setattr(completion_model, "most_logits_bytes", lambda _device: 4 * 16 * 5)
    monkeypatch.setattr(truncated_scores, "_FIRST_RANKS", 3)
    split = waits_of(ALGORITHMS["grpo"], 1000, Truncation(top_p=0.8))
    heads = -(-sum(len(s.tokens) for s in make_samples(0) if s.advantage) // 5)
    assert [wait.partition(" ")[0] for wait in split] == ["nonzero"] * heads + ["tolist"]


def test_waits_are_seen() -> None:
    """The counter itself."""
    values = torch.arange(4)
    with counted_waits() as waits:
        values.tolist()
        values.nonzero()
        values[values > 1]
        values.repeat_interleave(values)
        values.repeat_interleave(values, output_size=6)
        if values.sum():
            float(values.sum())
    names = [wait.partition(" ")[0] for wait in waits]
    assert names[:4] == ["tolist", "nonzero", "index", "repeat_interleave"]
    assert "__bool__" in names and "__float__" in names
