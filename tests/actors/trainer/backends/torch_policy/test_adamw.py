"""The optimizer step of one policy on one rank."""

import math
from typing import Any

import pytest
import torch

from flexmarl.actors.errors import NonFiniteGradient
from flexmarl.actors.messages import StepStats
from flexmarl.actors.trainer.backends.torch_policy.adamw import learning_rate
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_config import OptimizerConfig

from .policies import OPTIMIZER, gradient, make_policy, make_samples, moments_of, parameters, reference_loss


def test_steps_equal_plain_torch_with_every_row_computed() -> None:
    """Three steps against torch's own clipping and AdamW on the mean loss over all tokens, none skipped."""
    policy, plain = make_policy(), make_policy()
    named = list(plain.model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in named if "norm" not in name]},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        weight_decay=OPTIMIZER.weight_decay,
    )
    for step, expected_lr in enumerate((1e-3 / 3, 2e-3 / 3, 1e-3)):
        samples = make_samples(step, version=step)
        policy.accumulate(samples[::2])
        policy.accumulate(samples[1::2])
        stats = policy.optimizer_step()

        optimizer.zero_grad()
        torch.autograd.backward(reference_loss(plain, samples) / sum(len(s.tokens) for s in samples))
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), OPTIMIZER.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = expected_lr
        optimizer.step()

        assert policy.version == step + 1
        assert stats.figures["lr"] == pytest.approx(expected_lr)
        assert stats.figures["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        # Adam divides by the gradient's size, so rounding in tiny gradients shows at the scale of lr.
        assert float((parameters(policy) - parameters(plain)).abs().max()) < 1e-2 * expected_lr


def test_clipping_bounds_the_gradient_that_is_stepped_with(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    for parameter in policy.model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(1.0)
    seen: list[float] = []
    real_step = policy._optimizer.step

    def record_and_step() -> None:
        seen.append(float(gradient(policy).norm()))
        real_step()

    monkeypatch.setattr(policy._optimizer, "step", record_and_step)
    stats = policy.optimizer_step()
    assert stats.figures["grad_norm"] == pytest.approx(math.sqrt(gradient(policy).numel()), rel=1e-5)
    assert seen == pytest.approx([OPTIMIZER.max_grad_norm], rel=1e-4)


def trained_once(**optimizer: Any) -> TorchPolicy:
    """A policy with momentum, at version 1."""
    policy = make_policy(optimizer=OPTIMIZER.model_copy(update=optimizer))
    policy.accumulate(make_samples(7))
    assert not policy.optimizer_step().figures["skipped_updates"]
    return policy


def test_a_step_without_any_advantage_leaves_the_weights_alone() -> None:
    policy = trained_once()
    before, moments = parameters(policy), moments_of(policy)
    samples = make_samples(8, groups=1, version=1)
    assert policy.accumulate(samples).trained_samples == 0
    stats = policy.optimizer_step()
    assert policy.version == 2
    assert [stats.figures[name] for name in ("grad_norm", "loss", "skipped_updates")] == [0.0, 0.0, 1]
    assert stats.tokens == sum(len(s.tokens) for s in samples)
    assert torch.equal(parameters(policy), before) and torch.equal(moments_of(policy), moments)


def test_a_zero_gradient_may_step_by_the_momentum() -> None:
    policy = trained_once(zero_gradient="step")
    before = parameters(policy)
    policy.accumulate(make_samples(8, groups=1, version=1))
    stats = policy.optimizer_step()
    assert (stats.figures["grad_norm"], stats.figures["skipped_updates"]) == (0.0, False)
    assert float((parameters(policy) - before).abs().max()) > 0.1 * stats.figures["lr"]
    assert {state["step"].item() for state in policy._optimizer.state.values()} == {2.0}


def test_a_gradient_that_is_not_finite_may_be_skipped_so_often_in_a_row() -> None:
    policy = trained_once(non_finite_gradient="skip", max_non_finite_steps=2)
    before, moments = parameters(policy), moments_of(policy)

    def broken_step() -> StepStats:
        policy.accumulate(make_samples(8, version=policy.version))
        parameter = next(policy.model.parameters())
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = math.nan
        return policy.optimizer_step()

    for _ in range(2):
        assert broken_step().figures["skipped_updates"]
    assert policy.version == 3
    assert torch.equal(parameters(policy), before) and torch.equal(moments_of(policy), moments)
    policy.accumulate(make_samples(9, version=3))
    assert not policy.optimizer_step().figures["skipped_updates"] and not torch.equal(
        parameters(policy), before
    )
    for _ in range(2):
        assert broken_step().figures["skipped_updates"]
    with pytest.raises(NonFiniteGradient):
        broken_step()


def test_the_schedule_follows_the_runs_steps_if_the_policy_has_fewer() -> None:
    policy = make_policy()
    rates = []
    for run_step in (0, 5, 9):
        policy.accumulate(make_samples(8, version=policy.version))
        rates.append(policy.optimizer_step(run_step).figures["lr"])
    assert policy.version == 3
    assert rates == pytest.approx([learning_rate(OPTIMIZER, step, 10) for step in (0, 5, 9)])
    assert rates[2] < 0.2 * OPTIMIZER.lr


def test_gradients_and_moments_are_allocated_once() -> None:
    policy = make_policy()

    def addresses() -> list[int]:
        tensors = [p.grad for p in policy.model.parameters() if p.grad is not None]
        tensors += [moment for state in policy._optimizer.state.values() for moment in state.values()]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    for version in range(2):
        policy.accumulate(make_samples(9, version=version))
        policy.optimizer_step()
    assert addresses() == before
    assert not gradient(policy).any()


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("constant", 1, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("linear", 2, [1 / 3, 2 / 3, 1.0, 0.5, 0.0]),
        ("linear", 4, [0.2, 0.4, 0.6, 0.8, 0.0]),
    ],
)
def test_the_learning_rate_follows_the_schedule(schedule: Any, warmup: int, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=warmup)
    assert [learning_rate(config, step, 4) for step in range(5)] == pytest.approx(expected)
