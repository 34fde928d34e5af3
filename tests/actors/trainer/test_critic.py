import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.critic import clipped_value_loss, generalized_advantages

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
    _, returns = generalized_advantages(rewards, torch.tensor([0.3, 0.1, 0.9, 0.2]), lengths, lam=1.0)
    assert returns.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.5])


@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=20))
def test_the_value_loss_takes_the_worse_of_free_and_clipped(batch: list[tuple[float, float, float]]) -> None:
    found = clipped_value_loss(
        *(torch.tensor(column, dtype=torch.float64) for column in zip(*batch, strict=True))
    )
    for n, (value, old, target) in enumerate(batch):
        clipped = min(max(value, old - 0.2), old + 0.2)
        expected = max((value - target) ** 2, (clipped - target) ** 2) / 2
        assert found[n].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_value_that_moved_too_far_towards_its_target_is_held_back() -> None:
    value = torch.tensor([0.5], requires_grad=True)
    torch.autograd.backward(clipped_value_loss(value, torch.tensor([0.0]), torch.tensor([1.0])).sum())
    assert value.grad is not None and value.grad.tolist() == [0.0]
