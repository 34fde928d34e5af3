"""Two agents on one policy: uneven numbers of samples, credit assignment and temperature of each agent's own."""

import random
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import Sample
from flexmarl.actors.names import AgentName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_config import LossConfig

from ...algorithm import advantage
from .policies import make_double_policy, relative_error, stepped_gradient

SOLVER, JUDGE = AgentName("solver"), AgentName("judge")
TEMPERATURES = {SOLVER: 1.0, JUDGE: 0.7}
# The policy's algorithm, the solver's, the judge's.
MIXES: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "grpo"}, "grpo", "grpo"),
    ({"name": "dr_grpo", "constant_length": 8}, "at_grpo", "dr_mas"),
    ({"name": "gspo"}, "rloo", "grpo"),
    ({"name": "grpo", "kl_coefficient": 0.1, "correction": "tis"}, "grpo", "dr_grpo"),
    ({"name": "rloo", "kl_coefficient": 0.1}, "rloo", "rloo"),
    ({"name": "reinforce_pp", "kl_coefficient": 0.1}, "reinforce_pp", "reinforce_pp_baseline"),
    ({"name": "ppo", "kl_coefficient": 0.1}, "ppo", "ppo"),
]


def make_policy(loss: dict[str, Any], solver: str, judge: str) -> TorchPolicy:
    names = {SOLVER: solver, JUDGE: judge}
    credit = {agent: CreditConfig.model_validate({"name": name}) for agent, name in names.items()}
    return make_double_policy("shared", credit, LossConfig.model_validate(loss), 1.1)


def make_samples(seed: int, solver: str = "grpo", judge: str = "grpo") -> list[Sample]:
    return [sample for sample, _ in make_step(seed, solver, judge)]


def make_step(seed: int, solver: str, judge: str) -> list[tuple[Sample, tuple[float, ...]]]:
    """A step of three queries: the solver has one to three turns in a trajectory, the judge none to two. Beside each
    sample the rewards of its group. ``solver``, ``judge``: their algorithms."""
    rng = random.Random(seed)
    samples: list[tuple[Sample, tuple[float, ...]]] = []
    for query in range(3):
        for agent, name, turns in ((SOLVER, solver, (1, 3)), (JUDGE, judge, (0, 2))):
            rewards = (0.0, 1.0, rng.choice((0.0, 0.5)), rng.random())
            for trajectory, reward in enumerate(rewards):
                for turn in range(rng.randint(*turns)):
                    tokens = tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9)))
                    samples.append((
                        Sample(
                            f"1:q{query}_{turn + (10 if agent == JUDGE else 0)}_{trajectory}", agent, 1, 0,
                            f"1:q{query}", reward, advantage(reward, rewards, name=name),
                            tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9))),
                            tokens, tuple(rng.uniform(-3.2, -2.4) for _ in tokens),
                            temperature=TEMPERATURES[agent], group_size=len(rewards),
                        ),
                        rewards,
                    ))  # fmt: skip
    return samples


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join((*map(str, mix[0].values()), *mix[1:])))
@settings(max_examples=6)
@given(data=st.data(), seed=st.integers(0, 100))
def test_any_order_and_split_gives_the_gradient_of_one_batch_of_both_agents(
    mix: tuple[dict[str, Any], str, str], data: st.DataObject, seed: int
) -> None:
    samples = make_samples(seed, *mix[1:])
    whole, cut = make_policy(*mix), make_policy(*mix)
    whole.accumulate(samples)
    mixed = data.draw(st.permutations(samples))
    while mixed:
        size = data.draw(st.integers(1, len(mixed)))
        cut.accumulate(mixed[:size])
        mixed = mixed[size:]
    with pytest.MonkeyPatch.context() as patch:
        found, expected = stepped_gradient(cut, patch), stepped_gradient(whole, patch)
    assert expected.norm() > 1e-4
    assert relative_error(found, expected) < 1e-6
    assert cut.version == whole.version == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_formula_with_each_agents_own_advantage_and_temperature(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(seed, "grpo", "dr_grpo")
    policy, plain = (make_policy({"name": "dapo"}, "grpo", "dr_grpo") for _ in range(2))
    policy.accumulate([sample for sample, _ in step])
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample, rewards in step:
        advantage = sample.reward - fmean(rewards)
        if sample.agent == SOLVER:
            advantage /= stdev(rewards) + 1e-4
        row = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
        logprobs = (plain.model(input_ids=row).logits[0] / TEMPERATURES[AgentName(sample.agent)]).log_softmax(
            -1
        )
        for index, (token, old) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
            logprob = logprobs[len(sample.prompt_tokens) + index - 1, token]
            weight = torch.exp(logprob.detach() - old).clamp(max=2.0)
            ratio = torch.exp(logprob - logprob.detach())
            total = total - weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            count += 1
    torch.autograd.backward(total / count)
    gradients = [p.grad.flatten() for p in plain.model.parameters() if p.grad is not None]
    assert relative_error(stepped_gradient(policy, monkeypatch), torch.cat(gradients)) < 1e-6


def test_normalisation_is_over_the_samples_of_both_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each agent's own normalisation would give each a mean advantage of zero, as in two policies."""
    mix = ({"name": "reinforce_pp"}, "reinforce_pp", "reinforce_pp")
    samples = make_samples(1, *mix[1:])
    both = make_policy(*mix)
    both.accumulate(samples)
    together = stepped_gradient(both, monkeypatch) * sum(len(sample.tokens) for sample in samples)
    apart = torch.zeros_like(together)
    for agent in (SOLVER, JUDGE):
        alone, own = make_policy(*mix), [sample for sample in samples if sample.agent == agent]
        alone.accumulate(own)
        apart += stepped_gradient(alone, monkeypatch) * sum(len(sample.tokens) for sample in own)
    assert relative_error(together, apart) > 1e-2


def test_a_kl_in_the_rewards_is_compared_within_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both agents' samples of a query have the same group's name."""
    mix = ({"name": "rloo", "kl_coefficient": 0.1}, "rloo", "rloo")
    samples = make_samples(2, *mix[1:])
    both = make_policy(*mix)
    both.accumulate(samples)
    together = stepped_gradient(both, monkeypatch) * len(samples)
    apart = torch.zeros_like(together)
    for agent in (SOLVER, JUDGE):
        alone, own = make_policy(*mix), [sample for sample in samples if sample.agent == agent]
        alone.accumulate(own)
        apart += stepped_gradient(alone, monkeypatch) * len(own)
    assert relative_error(together, apart) < 1e-6


def test_a_sample_of_an_agent_with_another_policy_is_refused() -> None:
    policy = make_policy(*MIXES[0])
    stranger = replace(make_samples(0)[0], agent="stranger")
    with pytest.raises(ValueError, match="agent stranger does not use policy shared; solver, judge do"):
        policy.accumulate([stranger])
    assert not any(p.grad.any() for p in policy.model.parameters() if p.grad is not None)
