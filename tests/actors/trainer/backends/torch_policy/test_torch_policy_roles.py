"""Role-conditioned baselines of a policy: their formula, and their place in its state and files."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.objective.role_baselines import RoleBaselines
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from ...algorithm import algorithm, as_closed
from .policies import SMALLER_MODEL, make_double_policy, relative_error, stepped_gradient
from .test_torch_policy_files import tokenizer as tokenizer

FIRST, SECOND = AgentName("first"), AgentName("second")
OF = algorithm(name="rae", baseline_decay=0.9)
CREDIT = {FIRST: OF.credit, SECOND: OF.credit}


def make_policy() -> TorchPolicy:
    setup = PolicySetup(
        model=ModelConfig(config=SMALLER_MODEL, tokenizer="unused"), credit=CREDIT, loss=OF.loss
    )
    return TorchPolicy(PolicyName("player"), setup, seed=0, total_steps=10)


def game(number: int, first: float, version: int = 0) -> list[Sample]:
    """One trajectory of a zero-sum game: two turns of the first side, one of the second."""
    return [
        Sample(
            f"1:q{number}_{turn}_0",
            agent,
            1,
            version,
            f"1:q{number}",
            reward,
            reward,
            (1, 2),
            (3, 4),
            (-2.8, -2.9),
        )
        for turn, (agent, reward) in enumerate([(FIRST, first), (SECOND, -first), (FIRST, first)])
    ]


def test_each_role_has_its_mean_of_trajectories_in_any_order() -> None:
    samples = [sample for number in range(6) for sample in game(number, float(number % 3 == 0))]
    found = []
    for seed in range(3):
        baselines = RoleBaselines({FIRST: 0.5})
        mixed = random.Random(seed).sample(samples, len(samples))
        baselines.note(CREDIT, mixed[:5])
        baselines.note(CREDIT, mixed[5:])
        baselines.step(CREDIT)
        found.append(baselines)
    kept = 0.9**6
    assert found[0].means == {
        FIRST: pytest.approx(kept * 0.5 + (1 - kept) / 3),
        SECOND: pytest.approx(-(1 - kept) / 3),
    }
    assert found[0] == found[1] == found[2] and found[0].rewards == {}


def test_one_trajectory_moves_the_mean_as_in_the_paper() -> None:
    baselines, mean = RoleBaselines(), 0.0
    for number, reward in enumerate((1.0, 0.0, 1.0)):
        baselines.note(CREDIT, game(number, reward))
        baselines.step(CREDIT)
        mean = 0.9 * mean + 0.1 * reward
        assert baselines.means[FIRST] == pytest.approx(mean)


def test_turns_with_rewards_of_their_own_count_one_by_one() -> None:
    credit = {FIRST: algorithm(name="rae", rewards="both").credit, SECOND: OF.credit}
    one, _, two = game(0, 1.0)
    baselines = RoleBaselines()
    baselines.note(credit, [one, replace(two, reward=3.0)])
    baselines.step(credit)
    assert baselines.means == {FIRST: pytest.approx((1 - 0.95**2) * 2.0)}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "rae"])
def test_both_sides_of_a_zero_sum_game_push_one_policy_by_their_own_rewards(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of both sides' gradients, each with its own reward, in loops and float64: though the rewards add up to 0,
    nothing cancels, and nothing is compared across the sides."""
    of = algorithm(name=name, **({"constant_length": 5} if name == "dr_grpo" else {}))
    credit, rewards = {FIRST: of.credit, SECOND: of.credit}, (1.0, -1.0, 0.25)
    turns = [
        replace(
            sample,
            sample_id=f"1:q_{turn}_{number}",
            group="1:q",
            prompt_tokens=(1 + turn, 2),
            tokens=(3 + number, 4 + turn),
        )
        for number, reward in enumerate(rewards)
        for turn, sample in enumerate(game(number, reward))
    ]
    samples = as_closed(turns, credit)
    policy, plain = (make_double_policy("player", credit, of.loss, 1.1) for _ in range(2))
    policy.accumulate(samples[:4])
    policy.accumulate(samples[4:])
    divisor = {"token_mean": 2, "sequence_mean": 2, "sequence_sum": 1, "constant": 5}[of.loss.aggregation]
    assert of.loss.correction == "tis" and of.loss.correction_high is not None
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        row = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
        logprobs = plain.model(input_ids=row).logits[0, 1:-1].log_softmax(-1)
        for place, (token, engine) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
            weight = min(math.exp(logprobs[place, token].item() - engine), of.loss.correction_high)
            total = (
                total - weight * zero_sum_advantage(name, sample, rewards) * logprobs[place, token] / divisor
            )
    torch.autograd.backward(total / len(samples))
    expected = torch.cat([p.grad.flatten() for p in plain.model.parameters() if p.grad is not None])
    assert expected.norm() > 1e-4
    assert relative_error(stepped_gradient(policy, monkeypatch), expected) < 1e-6


def zero_sum_advantage(name: str, sample: Sample, first: Sequence[float]) -> float:
    """Within the sample's own side. ``first``: the rewards of the first side."""
    rewards = [reward if sample.agent == FIRST else -reward for reward in first]
    if name == "rae":
        return sample.reward
    centred = sample.reward - fmean(rewards)
    return {
        "grpo": centred / (stdev(rewards) + 1e-4),
        "dr_grpo": centred,
        "rloo": centred * len(rewards) / (len(rewards) - 1),
    }[name]


def test_a_policy_uses_the_means_of_the_steps_before_and_keeps_them_in_state_and_files(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    policy = make_policy()
    policy.accumulate([*game(0, 1.0), *game(1, 0.5)])
    assert policy.optimizer_step().figures["advantage_mean"] == pytest.approx(
        fmean([1.0, -1.0, 1.0, 0.5, -0.5, 0.5])
    )
    kept = 0.9**2
    means = policy._position.baselines.means
    assert means == {FIRST: pytest.approx((1 - kept) * 0.75), SECOND: pytest.approx(-(1 - kept) * 0.75)}
    policy.save(tmp_path / "saved", tokenizer)

    loaded = make_policy()
    loaded.load(tmp_path / "saved")
    assert loaded._position.baselines == RoleBaselines(dict(means))

    policy.accumulate(game(2, 1.0, version=1))
    moved = make_policy()
    moved.load_state(policy.step_state())
    assert moved._position.baselines.rewards == {FIRST: {"1:q2_0": 1.0}, SECOND: {"1:q2_0": -1.0}}
    expected = fmean([1.0 - means[FIRST], -1.0 - means[SECOND], 1.0 - means[FIRST]])
    assert policy.optimizer_step().figures["advantage_mean"] == pytest.approx(expected)
