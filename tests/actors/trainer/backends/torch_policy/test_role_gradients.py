"""Each agent's share of a shared policy's gradient, against policies that see the samples of one agent alone."""

import pytest
import torch

from flexmarl.actors.messages import Sample
from flexmarl.actors.trainer.backends.torch_policy.adamw import gradients
from flexmarl.actors.trainer.backends.torch_policy.role_gradients import RoleGradients
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy

from .test_torch_policy_roles import FIRST, SECOND, game, make_policy


def measuring(every: int = 1) -> TorchPolicy:
    policy = make_policy()
    policy._gradients._roles = RoleGradients((FIRST, SECOND), every)
    return policy


def norm_of(samples: list[Sample]) -> float:
    policy = make_policy()
    policy.accumulate(samples)
    live = list(gradients(policy.models.parameters).values())
    return float(torch.nn.utils.get_total_norm(live))


def test_shares_are_those_of_each_agents_samples_alone_over_all_micro_batches() -> None:
    samples = game(1, 1.0)
    policy = measuring()
    for sample in samples:
        policy.accumulate([sample])
    norms = {agent: norm_of([s for s in samples if s.agent == agent]) for agent in (FIRST, SECOND)}
    shares = policy.optimizer_step().by_agent
    assert min(norms.values()) > 0.0
    for agent, norm in norms.items():
        assert shares[agent]["gradient_share"] == pytest.approx(norm / sum(norms.values()), rel=1e-4)
        assert "token_share" in shares[agent]


def test_the_step_is_that_of_a_policy_that_measures_nothing() -> None:
    plain, policy = make_policy(), measuring()
    samples = game(1, 1.0)
    for each in (plain, policy):
        each.accumulate(samples[:2])
        each.accumulate(samples[2:])
    expected, found = (gradients(each.models.parameters) for each in (plain, policy))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7), name
    first, second = plain.optimizer_step(), policy.optimizer_step()
    assert second.figures["loss"] == pytest.approx(first.figures["loss"], abs=1e-6)
    assert second.figures["grad_norm"] == pytest.approx(first.figures["grad_norm"], rel=1e-4)
    assert (second.samples, second.tokens) == (first.samples, first.tokens)


def test_every_second_step_is_measured() -> None:
    roles = RoleGradients((FIRST, SECOND), 2)
    assert [roles.measures(version) for version in range(4)] == [False, True, False, True]
    assert not RoleGradients((FIRST, SECOND), 0).measures(0)
    assert not RoleGradients((FIRST,), 1).measures(0), "it has all of its policy's gradient"


def test_a_step_in_which_the_policy_has_moved_has_no_share() -> None:
    policy, other = measuring(), measuring()
    policy.accumulate(game(1, 1.0)[:2])
    other.load_state(policy.step_state())
    other.accumulate(game(1, 1.0)[2:])
    assert all("gradient_share" not in share for share in other.optimizer_step().by_agent.values())


def test_a_step_that_was_left_is_forgotten_when_another_state_is_loaded() -> None:
    policy, begin = measuring(), make_policy().step_state()
    policy.accumulate(game(1, 1.0)[:1])
    policy.load_state(begin)
    policy.accumulate(game(1, 1.0))
    shares = policy.optimizer_step().by_agent
    norms = [norm_of([s for s in game(1, 1.0) if s.agent == agent]) for agent in (FIRST, SECOND)]
    assert shares[FIRST]["gradient_share"] == pytest.approx(norms[0] / sum(norms), rel=1e-4)
