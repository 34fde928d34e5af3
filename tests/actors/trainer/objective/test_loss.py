import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.objective.loss import (
    LOG_RATIO_BOUND,
    denominator,
    sum_tokens,
    token_logprobs,
    token_logprobs_and_entropies,
)
from flexmarl.actors.trainer.objective.losses.clipped import clipped_loss
from flexmarl.actors.trainer.objective.losses.clipped_sequence import clipped_sequence_loss
from flexmarl.actors.trainer.objective.losses.clipped_weight import clipped_weight_loss
from flexmarl.actors.trainer.objective.losses.reinforce import reinforce_loss

torch.set_num_threads(1)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
tokens = st.tuples(st.floats(-8, 0), st.floats(-1, 1), st.floats(-3, 3))


def reference(logprob: float, old: float, advantage: float) -> tuple[float, float, float]:
    """Loss, its derivative by the log-probability, and 1 if the clip holds back; plain floats."""
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

    losses = clipped_loss(logprobs, old, advantages, **CLIP)
    torch.autograd.backward(losses.values.sum())

    assert losses.values.tolist() == pytest.approx([e[0] for e in expected], rel=1e-12, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([e[1] for e in expected], rel=1e-12, abs=1e-12)
    assert losses.held_back.tolist() == [bool(e[2]) for e in expected]
    ratios = [math.exp(lp - o) for lp, o in zip(logprobs.tolist(), old.tolist(), strict=True)]
    assert losses.ratio.tolist() == pytest.approx(ratios, rel=1e-12)
    assert not losses.ratio.requires_grad


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
    losses = clipped_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), **CLIP)
    torch.autograd.backward(losses.values.sum())
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-9)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.3, 1.1])
    losses = clipped_loss(logprobs, logprobs.detach().clone(), advantages, **CLIP)
    torch.autograd.backward(losses.values.sum())
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -advantages)
    assert not losses.held_back.any()
    assert losses.ratio.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("gap", [-1000.0, 1000.0, -LOG_RATIO_BOUND - 1, LOG_RATIO_BOUND + 1])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_ratios_stay_finite_in_value_and_gradient(gap: float, advantage: float) -> None:
    lengths, advantages = torch.tensor([1]), torch.tensor([advantage])
    for loss in (
        partial(clipped_loss, clip_low=0.2, clip_high=0.28),
        partial(clipped_weight_loss, clip_low=0.2, clip_high=0.28),
        partial(clipped_sequence_loss, lengths=lengths, clip_low=0.2, clip_high=0.28),
    ):
        logprobs = torch.tensor([gap], requires_grad=True)
        losses = loss(logprobs, torch.zeros(1), advantages)
        torch.autograd.backward(losses.values.sum())
        assert losses.values.isfinite().all()
        assert logprobs.grad is not None and logprobs.grad.isfinite().all()


# --------------------------------------------------------------------------- sequences


@given(st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=6))
def test_gspo_is_a_per_sequence_reference(batch: list[list[tuple[float, float, float]]]) -> None:
    lengths = torch.tensor([len(sequence) for sequence in batch])
    flat = [token for sequence in batch for token in sequence]
    old = torch.tensor([t[0] for t in flat], dtype=torch.float64)
    logprobs = (old + torch.tensor([t[1] for t in flat], dtype=torch.float64)).requires_grad_()
    per_sequence = torch.tensor([sequence[0][2] for sequence in batch], dtype=torch.float64)
    advantages = per_sequence.repeat_interleave(lengths)

    losses = clipped_sequence_loss(logprobs, old, advantages, lengths, **CLIP)
    loss = sum_tokens(losses.values, lengths, "sequence_mean")
    torch.autograd.backward(loss)

    expected, gradient = 0.0, []
    for sequence in batch:
        mean = math.fsum(delta for _, delta, _ in sequence) / len(sequence)
        value, slope, _ = reference(mean, 0.0, sequence[0][2])
        expected += value
        gradient += [slope / len(sequence)] * len(sequence)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert logprobs.grad is not None
    # If the ratio is at a bound to the last bit, either side is right: such examples are rare and of measure zero.
    at_bound = [
        abs(math.exp(math.fsum(d for _, d, _ in sequence) / len(sequence)) - bound) < 1e-9
        for sequence in batch
        for bound in (0.8, 1.28)
    ]
    if not any(at_bound):
        assert logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-9)


def test_the_sequence_ratio_is_the_geometric_mean_and_clips_all_tokens_together() -> None:
    logprobs = torch.tensor([0.9, -0.3, 0.0], dtype=torch.float64, requires_grad=True)
    losses = clipped_sequence_loss(
        logprobs, torch.zeros(3), torch.ones(3), torch.tensor([2, 1]), clip_low=0.2, clip_high=0.28
    )
    assert losses.ratio.tolist() == pytest.approx([math.exp(0.3)] * 2 + [1.0])
    assert losses.held_back.tolist() == [True, True, False]


# --------------------------------------------------------------------------- weights, not clips


@given(st.lists(tokens, min_size=1, max_size=20))
def test_cispo_is_reinforce_with_a_bounded_weight(batch: list[tuple[float, float, float]]) -> None:
    old = torch.tensor([b[0] for b in batch], dtype=torch.float64)
    logprobs = (old + torch.tensor([b[1] for b in batch], dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([b[2] for b in batch], dtype=torch.float64)
    losses = clipped_weight_loss(logprobs, old, advantages, clip_low=0.3, clip_high=0.5)
    torch.autograd.backward(losses.values.sum())
    assert logprobs.grad is not None
    for n, (logprob, before, advantage) in enumerate(
        zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True)
    ):
        weight = min(max(math.exp(logprob - before), 0.7), 1.5)
        assert losses.values[n].item() == pytest.approx(-weight * advantage * logprob, rel=1e-12, abs=1e-12)
        assert logprobs.grad[n].item() == pytest.approx(-weight * advantage, rel=1e-12, abs=1e-12)


def test_no_clip_takes_a_tokens_gradient_from_cispo() -> None:
    logprobs = torch.tensor([math.log(9.0), math.log(0.01)], dtype=torch.float64, requires_grad=True)
    losses = clipped_weight_loss(logprobs, torch.zeros(2), torch.ones(2), clip_low=1.0, clip_high=4.0)
    torch.autograd.backward(losses.values.sum())
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-5.0, -0.01])
    assert losses.held_back.tolist() == [True, False]


def test_reinforce_has_no_ratio() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses = reinforce_loss(logprobs, torch.tensor([0.5, -3.0]))
    torch.autograd.backward(losses.values.sum())
    assert losses.values.tolist() == [0.5, -6.0]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-0.5, 3.0]
    assert not losses.held_back.any()


# --------------------------------------------------------------------------- sums and denominators


def test_what_each_aggregation_divides_by() -> None:
    values, lengths = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([3, 1])
    found = {
        name: float(sum_tokens(values, lengths, name) / denominator(name, tokens=4, sequences=2, constant=8))
        for name in ("token_mean", "sequence_mean", "sequence_sum", "constant")
    }
    assert found == {"token_mean": 4.0, "sequence_mean": 6.0, "sequence_sum": 8.0, "constant": 1.0}


def test_a_step_of_nothing_divides_by_one_and_a_constant_is_asked_for() -> None:
    assert denominator("token_mean", tokens=0, sequences=0, constant=None) == 1
    assert denominator("sequence_mean", tokens=0, sequences=0, constant=None) == 1
    with pytest.raises(ValueError, match="constant_length"):
        denominator("constant", tokens=1, sequences=1, constant=None)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_token_may_have_a_temperature_of_its_own(dtype: torch.dtype) -> None:
    logits = torch.randn((6, 5), dtype=dtype, generator=torch.Generator().manual_seed(0))
    chosen, temperatures = torch.tensor([0, 1, 2, 3, 4, 0]), [1.0, 0.7, 0.7, 1.5, 1.0, 0.1]
    found = token_logprobs(logits, chosen, torch.tensor(temperatures, dtype=torch.float64))
    assert found.dtype == dtype
    for n, temperature in enumerate(temperatures):
        alone = token_logprobs(logits[n : n + 1], chosen[n : n + 1], temperature)
        assert torch.equal(found[n : n + 1], alone), "the same bits as a batch of one temperature"


def test_the_logprobs_beside_entropies_are_those_without_in_float32_too() -> None:
    logits = torch.randn((6, 50), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    tokens, temperatures = torch.arange(6), torch.linspace(0.5, 2, 6)
    found = token_logprobs_and_entropies(logits, tokens, temperatures)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:, 0], token_logprobs(logits, tokens, temperatures))
    uniform = token_logprobs_and_entropies(torch.zeros(1, 50), torch.tensor([3]))
    assert uniform[0].tolist() == pytest.approx([-math.log(50), math.log(50)], rel=1e-6)
