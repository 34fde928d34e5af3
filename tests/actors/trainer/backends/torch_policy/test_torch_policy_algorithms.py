"""One policy on one rank, algorithm by algorithm: any split, whole batches, the reference policy, stale samples."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.errors import CheckpointIncomplete, StaleSample
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.objective.loss import denominator
from flexmarl.actors.trainer.objective.objective import (
    CompletionTokens,
    batch_loss,
    step_advantages,
)
from flexmarl.actors.trainer.padding import pad_rows
from flexmarl.actors.trainer.trainer_config import OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from ...algorithm import algorithm, as_closed
from .policies import SMALLER_MODEL, relative_error, stepped_gradient

EXAMPLES = [((index % 10, 11), (index % 10, 12, 13)) for index in range(16)]


def make_policy(max_staleness: int = 0, **given: Any) -> TorchPolicy:
    halves = algorithm(**given)
    return TorchPolicy(
        PolicyName("solver"),
        PolicySetup(
            model=ModelConfig(config=SMALLER_MODEL, tokenizer="unused"),
            credit={AgentName("solver"): halves.credit},
            loss=halves.loss.with_constant_length(8),
            optimizer=OptimizerConfig(lr=1e-2),
            max_staleness=max_staleness,
        ),
        seed=0,
        total_steps=10,
    )


def make_samples(seed: int, version: int = 0, **given: Any) -> list[Sample]:
    """As they come under an algorithm."""
    rng = random.Random(seed)
    samples = []
    for group in range(3):
        rewards = (0.0, 1.0, rng.choice((0.0, 0.5, 1.0)), 0.5) if group else (1.0,) * 4
        for trajectory, reward in enumerate(rewards):
            for turn in range(rng.randint(1, 2)):
                tokens = tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9)))
                name = f"1:q{group}"
                samples.append(
                    Sample(
                        f"{name}_{turn}_{trajectory}", "solver", version, version, name, reward, 0.0,
                        tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9))),
                        tokens, tuple(rng.uniform(-3.2, -2.4) for _ in tokens),
                    )
                )  # fmt: skip
    return as_closed(samples, {AgentName("solver"): algorithm(**given).credit})


def make_tokenizer() -> PreTrainedTokenizerFast:
    fast: Any = PreTrainedTokenizerFast  # its constructor has no types
    return fast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))  # type: ignore[no-any-return]


ALL = [{"name": name} for name in ALGORITHMS] + [
    {"name": "grpo", "kl_coefficient": 0.1, "correction": "tis"},
    {"name": "rloo", "kl_coefficient": 0.1},
    {"name": "reinforce_pp", "kl_coefficient": 0.1},
    {"name": "grpo", "aggregation": "sequence_mean", "correction": "icepop"},
    {"name": "ppo", "kl_coefficient": 0.1, "aggregation": "sequence_mean"},
    {"name": "grpo", "entropy_coefficient": 0.1},
]


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: "-".join(map(str, a.values())))
@settings(max_examples=4)
@given(data=st.data(), seed=st.integers(0, 100))
def test_any_order_and_split_steps_with_the_one_batch_gradient(
    algorithm: dict[str, Any], data: st.DataObject, seed: int
) -> None:
    samples = make_samples(seed, **algorithm)
    whole, cut = make_policy(**algorithm), make_policy(**algorithm)
    for policy in (whole, cut):
        policy.model.double()
        if policy.models.reference is not None:
            policy.models.reference.model.double()
        if policy._critic is not None:
            torch.nn.init.constant_(policy._critic.model.double().head.weight, 0.1)
    whole.accumulate(samples)
    mixed = data.draw(st.permutations(samples))
    while mixed:
        size = data.draw(st.integers(1, len(mixed)))
        stats = cut.accumulate(mixed[:size])
        assert (stats.samples, stats.tokens) == (size, sum(len(s.tokens) for s in mixed[:size]))
        mixed = mixed[size:]
    with pytest.MonkeyPatch.context() as patch:
        found, expected = stepped_gradient(cut, patch), stepped_gradient(whole, patch)
    assert expected.norm() > 1e-4
    assert relative_error(found, expected) < 1e-6


def test_a_step_that_was_held_is_the_objective_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = algorithm(name="reinforce_pp")
    samples = make_samples(3, name="reinforce_pp")
    held, plain = make_policy(name="reinforce_pp"), make_policy()
    for index in range(0, len(samples), 5):
        held.accumulate(samples[index : index + 5])
        assert not any(p.grad.any() for p in held.model.parameters() if p.grad is not None), (
            "held, not trained"
        )
    found = stepped_gradient(held, monkeypatch)

    rows = pad_rows([(sample.prompt_tokens, sample.tokens) for sample in samples], 16)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    tokens = CompletionTokens(
        logprobs=plain.models.completions.logprobs(rows, 1.0),
        engine_logprobs=torch.tensor([lp for sample in samples for lp in sample.logprobs]),
        advantages=step_advantages(
            halves.loss, {AgentName("solver"): halves.credit}, samples, [s.advantage for s in samples], None
        ),
        lengths=lengths,
        group_sizes=torch.tensor([sample.group_size for sample in samples]),
        rewards=torch.tensor([sample.reward for sample in samples]),
    )
    loss, _ = batch_loss(halves.loss, tokens)
    divisor = denominator("token_mean", tokens=int(lengths.sum()), sequences=len(samples), constant=None)
    parameters = list(plain.model.parameters())
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss / divisor, parameters)])
    clipped = gradient * min(1.0, 1.0 / float(gradient.norm()))
    assert relative_error(found, clipped) < 1e-5


def test_held_samples_are_gone_after_their_step_and_after_loading(tmp_path: Path) -> None:
    policy = make_policy(name="reinforce_pp")
    tokenizer = make_tokenizer()
    policy.save(tmp_path / "start", tokenizer)
    policy.accumulate(make_samples(1))
    policy.load(tmp_path / "start")
    dropped = policy.optimizer_step()
    assert (dropped.samples, dropped.figures["grad_norm"]) == (0, 0.0)
    policy.accumulate(make_samples(2, version=1))
    assert policy.optimizer_step().samples == len(make_samples(2))
    again = policy.optimizer_step()
    assert (again.samples, again.figures["grad_norm"]) == (0, 0.0)


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_what_is_malformed_is_refused_at_once_also_where_it_would_be_held(name: str) -> None:
    policy = make_policy(name=name)
    good = next(sample for sample in make_samples(1) if sample.group != "1:q0")
    for change in ({"prompt_tokens": ()}, {"tokens": (16,) * len(good.tokens)}, {"logprobs": ()}):
        with pytest.raises(ValueError):
            policy.accumulate([replace(good, **change)])
    assert policy.optimizer_step().samples == 0


# --------------------------------------------------------------------------- the reference policy


def test_the_reference_is_the_policy_after_its_sft_and_stays_so(tmp_path: Path) -> None:
    policy = make_policy(name="grpo", kl_coefficient=0.5)
    assert policy.models.reference is not None
    policy.sft(EXAMPLES)
    policy.sft_done()
    warm = {name: weights.clone() for name, weights in policy.weights().items()}
    policy.accumulate(make_samples(1))
    policy.optimizer_step()
    reference = policy.models.reference.model.state_dict()
    assert all(torch.equal(reference[name], weights) for name, weights in warm.items())
    assert not all(torch.equal(reference[name], weights) for name, weights in policy.weights().items())

    tokenizer = make_tokenizer()
    policy.save(tmp_path / "kept", tokenizer)
    resumed = make_policy(name="grpo", kl_coefficient=0.5)
    resumed.load(tmp_path / "kept")
    for each in (policy, resumed):
        each.accumulate(make_samples(2, version=1))
        each.optimizer_step()
    assert all(torch.equal(policy.weights()[n], w) for n, w in resumed.weights().items())
    without = make_policy(name="grpo")
    without.save(tmp_path / "without", tokenizer)
    with pytest.raises(CheckpointIncomplete, match="reference"):
        resumed.load(tmp_path / "without")


def test_a_kl_holds_the_policy_where_no_reward_moves_it() -> None:
    """Equal rewards teach nothing, so the KL alone trains: the policy comes back to its reference."""
    policy = make_policy(name="grpo", kl_coefficient=1.0, kl_estimator="k2")
    assert policy.models.reference is not None
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05)
    rng, distances = random.Random(0), []
    for version in range(24):
        prompts = [tuple(rng.randrange(16) for _ in range(3)) for _ in range(64)]
        rows = pad_rows([(prompt, (rng.randrange(16), rng.randrange(16))) for prompt in prompts], 16)
        with torch.no_grad():
            ours = policy.models.completions.logprobs(rows, 1.0)
            gap = ours - policy.models.reference.logprobs(rows, 1.0)
        distances.append(float(gap.square().mean()))
        pairs = zip(prompts, rows.targets.view(-1, 2).tolist(), ours.view(-1, 2).tolist(), strict=True)
        policy.accumulate(
            [
                Sample(f"q{n}_0_0", "solver", 1, version, f"q{n}", 1.0, 0.0, prompt, tuple(drawn), tuple(lp))
                for n, (prompt, drawn, lp) in enumerate(pairs)
            ]
        )
        policy.optimizer_step()
    assert distances[-1] < 0.5 * distances[0]


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo"])
def test_the_kl_that_is_measured_is_k3_over_all_tokens(name: str) -> None:
    """KL in the loss, in the rewards of a held step, and in a critic's rewards."""
    policy = make_policy(name=name, kl_coefficient=0.5, kl_estimator="k1" if name != "grpo" else "k2")
    assert policy.models.reference is not None
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05)
    samples = make_samples(2)
    rows = pad_rows([(sample.prompt_tokens, sample.tokens) for sample in samples], 16)
    with torch.no_grad():
        ours, reference = (
            of.logprobs(rows, 1.0) for of in (policy.models.completions, policy.models.reference)
        )
    drawn_by_engine = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    # In a held step the KL is between the engine's policy and the reference.
    drawn = drawn_by_engine if name == "rloo" else ours
    expected = (torch.expm1(reference - drawn) - (reference - drawn)).mean()
    policy.accumulate(samples[:3])
    policy.accumulate(samples[3:])
    assert policy.optimizer_step().figures["kl"] == pytest.approx(float(expected), rel=1e-3)


def test_a_policy_without_a_kl_keeps_no_second_model() -> None:
    assert make_policy(name="rloo").models.reference is None


# --------------------------------------------------------------------------- stale samples


def test_a_sample_may_be_as_stale_as_allowed_and_no_staler() -> None:
    policy = make_policy(max_staleness=1, name="grpo", correction="decoupled")
    policy.accumulate(make_samples(1))
    policy.optimizer_step()
    assert policy.accumulate(make_samples(2, version=0)).trained_samples > 0
    policy.optimizer_step()
    with pytest.raises(StaleSample, match="version 0.*version 2"):
        policy.accumulate(make_samples(3, version=0))
    with pytest.raises(StaleSample, match="version 3.*version 2"):
        policy.accumulate(make_samples(3, version=3))
