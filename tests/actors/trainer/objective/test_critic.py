import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.objective.critic import (
    explained_variance,
    generalized_advantages,
    token_rewards,
    value_loss,
    value_sums,
)

values = st.floats(-5, 5)
sequences = st.lists(st.lists(st.tuples(values, values), min_size=1, max_size=7), min_size=1, max_size=5)


@given(sequences, st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_the_discounted_sum_of_the_temporal_differences(
    batch: list[list[tuple[float, float]]], gamma: float, lam: float
) -> None:
    """Eq. 16 of the paper as it is written, token by token."""
    advantages, returns = generalized_advantages(
        torch.tensor([r for sequence in batch for r, _ in sequence], dtype=torch.float64),
        torch.tensor([v for sequence in batch for _, v in sequence], dtype=torch.float64),
        torch.tensor([len(sequence) for sequence in batch]),
        max(map(len, batch)),
        gamma=gamma,
        lam=lam,
    )
    expected = []
    for sequence in batch:
        after = [*(v for _, v in sequence), 0.0]
        deltas = [r + gamma * after[t + 1] - v for t, (r, v) in enumerate(sequence)]
        expected += [
            sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
            for t in range(len(sequence))
        ]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    flat = [v for sequence in batch for _, v in sequence]
    assert returns.tolist() == pytest.approx(
        [a + v for a, v in zip(expected, flat, strict=True)], rel=1e-9, abs=1e-9
    )


def test_with_lambda_one_the_returns_are_the_rewards_to_go() -> None:
    rewards, lengths = torch.tensor([0.0, 0.0, 1.0, 0.5]), torch.tensor([3, 1])
    _, returns = generalized_advantages(rewards, torch.tensor([0.3, 0.1, 0.9, 0.2]), lengths, 3, lam=1.0)
    assert returns.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.5])


def test_a_sequence_has_the_same_advantages_whatever_it_is_padded_to() -> None:
    rewards, values = torch.randn(40), torch.randn(40)
    both, _ = generalized_advantages(rewards, values, torch.tensor([33, 7]), 33, gamma=0.9, lam=0.8)
    each = [
        generalized_advantages(rewards[part], values[part], torch.tensor([size]), size, gamma=0.9, lam=0.8)[0]
        for part, size in ((slice(33), 33), (slice(33, 40), 7))
    ]
    assert torch.equal(both, torch.cat(each))


def test_the_reward_comes_with_the_last_token_and_penalties_with_each() -> None:
    found = token_rewards(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25, 0.0]), torch.tensor([2, 1]))
    assert found.tolist() == [-0.5, 0.75, -2.0]


def test_the_value_loss_is_half_the_squared_error_and_the_target_stands_still() -> None:
    value = torch.tensor([0.5, 1.0], requires_grad=True)
    target = torch.tensor([2.0, 1.0], requires_grad=True)
    losses = value_loss(value, target)
    torch.autograd.backward(losses.sum())
    assert losses.tolist() == [1.125, 0.0]
    assert value.grad is not None and value.grad.tolist() == [-1.5, 0.0] and target.grad is None


def test_explained_variance_knows_foresight_from_a_guess() -> None:
    returns = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(4, value_sums(returns, returns)) == 1.0
    assert explained_variance(4, value_sums(torch.full((4,), 0.5), returns)) == 0.0
    assert explained_variance(4, value_sums(1 - returns, returns)) == -3.0
    equal = torch.full((4,), 0.1)
    assert explained_variance(4, value_sums(torch.zeros(4), equal)) is None
    assert explained_variance(0, torch.zeros(4)) is None, "a step without samples"
