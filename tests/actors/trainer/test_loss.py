import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.loss import clipped_policy_loss, token_logprobs

torch.set_num_threads(1)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
tokens = st.tuples(st.floats(-8, 0), st.floats(-1, 1), st.floats(-3, 3))


def reference(logprob: float, old: float, advantage: float) -> tuple[float, float, float]:
    """Loss, its derivative by the log-probability, and 1 where the clip holds back; plain floats."""
    ratio = math.exp(logprob - old)
    bound = min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
    if bound * advantage < ratio * advantage:
        return -bound * advantage, 0.0, 1.0
    return -ratio * advantage, -ratio * advantage, 0.0


@given(st.lists(tokens, min_size=1, max_size=20))
def test_clipped_loss_is_the_sum_of_a_per_token_reference(batch: list[tuple[float, float, float]]) -> None:
    old = torch.tensor([b[0] for b in batch], dtype=torch.float64)
    logprobs = (old + torch.tensor([b[1] for b in batch], dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([b[2] for b in batch], dtype=torch.float64)
    expected = [
        reference(*row) for row in zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True)
    ]

    loss, diagnostics = clipped_policy_loss(logprobs, old, advantages, **CLIP)
    torch.autograd.backward(loss)

    assert loss.item() == pytest.approx(math.fsum(e[0] for e in expected), rel=1e-12, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([e[1] for e in expected], rel=1e-12, abs=1e-12)
    deviation = math.fsum(
        abs(math.exp(lp - o) - 1) for lp, o in zip(logprobs.tolist(), old.tolist(), strict=True)
    )
    found = diagnostics.tolist()
    assert found[0] == loss.item()
    assert found[1] == sum(e[2] for e in expected)
    assert found[2] == pytest.approx(deviation, rel=1e-12, abs=1e-12)
    assert not diagnostics.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.5, 1.0, 0.0),  # good and already likelier: no further
        (0.5, 1.0, -0.5),  # good but less likely than it was: come back, however far it is
        (0.5, -1.0, 0.0),
        (1.5, -1.0, 1.5),
        (1.27, 1.0, -1.27),  # the upper side is the wider one
        (1.27, -1.0, 1.27),
        (0.79, -1.0, 0.0),
    ],
)
def test_the_minimum_is_pessimistic_and_the_range_asymmetric(
    ratio: float, advantage: float, gradient: float
) -> None:
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss, _ = clipped_policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), **CLIP)
    torch.autograd.backward(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-9)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.3, 1.1])
    loss, diagnostics = clipped_policy_loss(logprobs, logprobs.detach().clone(), advantages, **CLIP)
    torch.autograd.backward(loss)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -advantages)
    assert diagnostics.tolist()[1:] == [0.0, 0.0]


@given(
    st.lists(st.lists(st.floats(-30, 30), min_size=5, max_size=5), min_size=1, max_size=8),
    st.sampled_from([0.3, 1.0, 1.7]),
)
def test_token_logprobs_against_plain_floats(rows: list[list[float]], temperature: float) -> None:
    chosen = [index % 5 for index in range(len(rows))]
    found = token_logprobs(torch.tensor(rows, dtype=torch.float64), torch.tensor(chosen), temperature)
    for row, token, logprob in zip(rows, chosen, found.tolist(), strict=True):
        scaled = [value / temperature for value in row]
        top = max(scaled)
        normaliser = top + math.log(math.fsum(math.exp(value - top) for value in scaled))
        assert logprob == pytest.approx(scaled[token] - normaliser, rel=1e-10, abs=1e-10)


def test_token_logprobs_compute_in_float32_for_lower_precision() -> None:
    logits = torch.linspace(-4, 4, 1000).to(torch.bfloat16).unsqueeze(0)
    found = token_logprobs(logits, torch.tensor([500]))
    assert found.dtype == torch.float32
    assert torch.equal(found, token_logprobs(logits.float(), torch.tensor([500])))
