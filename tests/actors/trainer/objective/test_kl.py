import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.credit.algorithms import KlEstimator
from flexmarl.actors.trainer.objective.kl import kl_estimate

pairs = st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=20)
ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")


@given(pairs)
def test_against_plain_floats(tokens: list[tuple[float, float]]) -> None:
    policy = torch.tensor([a for a, _ in tokens], dtype=torch.float64)
    reference = torch.tensor([b for _, b in tokens], dtype=torch.float64)
    for n, (ours, theirs) in enumerate(tokens):
        d = ours - theirs
        assert kl_estimate(policy, reference, "k1")[n].item() == d
        assert kl_estimate(policy, reference, "k2")[n].item() == pytest.approx(d * d / 2)
        assert kl_estimate(policy, reference, "k3")[n].item() == pytest.approx(
            math.exp(-d) - 1 + d, rel=1e-9, abs=1e-12
        )


def distributions(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.linspace(-1, 1, 7, dtype=dtype).requires_grad_()
    return logits, torch.tensor([0.3, 0.1, 0.05, 0.2, 0.15, 0.1, 0.1], dtype=dtype).log()


def test_k1_and_k3_are_unbiased() -> None:
    logits, reference = distributions()
    policy = logits.log_softmax(-1).detach()
    exact = (policy.exp() * (policy - reference)).sum().item()
    for estimator in (ESTIMATORS[0], ESTIMATORS[2]):
        mean = (policy.exp() * kl_estimate(policy, reference, estimator)).sum().item()
        assert mean == pytest.approx(exact, rel=1e-12)


def test_the_expected_gradient_of_k2_is_that_of_the_divergence_and_that_of_k1_is_zero() -> None:
    logits, reference = distributions()
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    probability = policy.exp().detach()
    found = [
        torch.autograd.grad(
            (probability * kl_estimate(policy, reference, estimator)).sum(), logits, retain_graph=True
        )[0]
        for estimator in ESTIMATORS[:2]
    ]
    assert torch.allclose(found[0], torch.zeros_like(exact), atol=1e-12)
    assert torch.allclose(found[1], exact, rtol=1e-10)
    assert exact.norm() > 1e-2


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_diverge_by_nothing_and_extremes_stay_finite(estimator: KlEstimator) -> None:
    same = torch.tensor([-0.5, -9.0])
    assert kl_estimate(same, same, estimator).tolist() == [0.0, 0.0]
    far = torch.tensor([-1e4, 0.0], requires_grad=True)
    reference = torch.tensor([0.0, -1e4], requires_grad=True)
    found = kl_estimate(far, reference, estimator)
    torch.autograd.backward(found.sum())
    assert found.isfinite().all()
    assert far.grad is not None and far.grad.isfinite().all()
    assert reference.grad is None
