"""The trainer's log-probabilities for the record: those of the forward, each sample once, of the policy that the step
began with."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from flexmarl.actors.compared_logprobs import Compared
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_config import LossConfig, OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.core.spans import is_kept

from .policies import SMALLER_MODEL, make_samples
from .ranks import Ranks, compare, gang_setup


def samples_of(seed: int, version: int = 0) -> list[Sample]:
    """As the store has them: with the step in the id."""
    return [
        replace(sample, sample_id=f"{version + 1}:{sample.sample_id}")
        for sample in make_samples(seed, version=version)
    ]


def policy_of(name: str = "dapo", *, share: float = 1.0, updates: int = 1) -> TorchPolicy:
    setup = PolicySetup(
        model=ModelConfig(config=SMALLER_MODEL, tokenizer="unused"),
        credit={AgentName("solver"): CreditConfig(name=name)},
        loss=LossConfig(name=name),
        optimizer=OptimizerConfig(lr=1e-2),
        updates=updates,
        compared_share=share,
    )
    return TorchPolicy(PolicyName("solver"), setup, seed=0, total_steps=10)


def plain(policy: TorchPolicy, samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Trainer minus engine, row by row."""
    found = {}
    for sample in samples:
        row = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
        with torch.no_grad():
            logprobs = policy.model(input_ids=row).logits[0].log_softmax(-1)
        first = len(sample.prompt_tokens) - 1
        own = [float(logprobs[first + place, token]) for place, token in enumerate(sample.tokens)]
        found[sample.sample_id] = [a - b for a, b in zip(own, sample.logprobs, strict=True)]
    return found


def assert_equal(found: dict[str, Compared], expected: dict[str, list[float]], version: int = 0) -> None:
    assert found.keys() == expected.keys()
    for name, compared in found.items():
        assert compared.version == version
        assert compared.differences.tolist() == pytest.approx(expected[name], rel=2e-3, abs=1e-5)


def with_advantage(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.advantage]


def test_every_trained_sample_is_compared_once() -> None:
    policy, samples = policy_of(), samples_of(1)
    expected = plain(policy, with_advantage(samples))
    assert 0 < len(expected) < len(samples), "the model never sees those without an advantage"
    policy.accumulate(samples[:5])
    found = policy.take_compared()
    policy.accumulate(samples[5:])
    second = policy.take_compared()
    assert not found.keys() & second.keys()
    assert_equal(found | second, expected)
    policy.optimizer_step()
    assert policy.take_compared() == {}
    later = samples_of(2, version=1)
    expected = plain(policy, with_advantage(later))
    policy.accumulate(later)
    assert_equal(policy.take_compared(), expected, version=1)


@pytest.mark.parametrize(("name", "updates"), [("dapo", 2), ("reinforce_pp", 1), ("reinforce_pp", 2)])
def test_samples_of_later_updates_are_compared_with_the_policy_of_the_begin(name: str, updates: int) -> None:
    policy, samples = policy_of(name, updates=updates), samples_of(1)
    trained = samples if name == "reinforce_pp" else with_advantage(samples)
    expected = plain(policy, trained)
    policy.accumulate(samples)
    found = policy.take_compared()
    assert len(found) < len(expected)
    policy.optimizer_step()
    assert_equal(found | policy.take_compared(), expected)


def test_a_share_is_of_whole_queries_and_none_costs_nothing() -> None:
    samples = samples_of(1)
    share = 0.2
    kept = [sample for sample in with_advantage(samples) if is_kept(sample.group, share)]
    assert 0 < len({sample.group for sample in kept}) < 2, "choose another share"
    policy = policy_of(share=share)
    expected = plain(policy, kept)
    policy.accumulate(samples)
    assert_equal(policy.take_compared(), expected)
    off = policy_of(share=0.0)
    off.accumulate(samples)
    assert off.take_compared() == {} and off._gradients._compared._on_device == []


def test_each_rank_has_its_own_samples_and_together_they_have_all(ranks: Ranks) -> None:
    setup = gang_setup({"name": "dapo"}).model_copy(update={"compared_share": 1.0})
    samples = samples_of(3)
    (alone,) = ranks.run_alone(compare, (setup, samples))
    parts = ranks.run(2, compare, setup, samples)
    assert all(parts) and not parts[0].keys() & parts[1].keys()
    together = parts[0] | parts[1]
    assert together.keys() == alone.keys() == {sample.sample_id for sample in with_advantage(samples)}
    for name, differences in together.items():
        assert differences == pytest.approx(alone[name], rel=2e-3, abs=1e-5)
