"""Token sampling: the right distribution, and a pure function of (seed, index, distribution)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.inference.engines.embedded.token_sampling import (
    Sampling,
    sample_tokens,
    stream_keys,
    uniforms,
)

CPU = torch.device("cpu")
# chi-square at p = 1e-6 for k - 1 = 7 degrees of freedom; the seeds are fixed, so it holds or it doesn't
CHI_SQUARE_LIMIT = 40.5


def _tokens_of(logits: torch.Tensor, count: int, temperature: float) -> torch.Tensor:
    points = torch.from_numpy(uniforms(stream_keys(range(count)), np.array([3]))).unsqueeze(1)
    tokens, _ = sample_tokens(logits.expand(count, -1), points, Sampling.of([temperature] * count, CPU))
    return tokens.squeeze(1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax_over_seeds(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, 0.2])
    count = 20_000
    seen = torch.bincount(_tokens_of(logits, count, temperature), minlength=8)
    expected = torch.softmax(logits / temperature, -1) * count
    assert ((seen - expected) ** 2 / expected).sum() < CHI_SQUARE_LIMIT


def test_a_stream_is_uniform_over_its_indices() -> None:
    numbers = uniforms(stream_keys([7]), np.arange(20_000))
    seen = np.bincount((numbers * 8).astype(int), minlength=8)
    assert ((seen - 2500) ** 2 / 2500).sum() < CHI_SQUARE_LIMIT
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03


def test_neighbouring_seeds_are_independent() -> None:
    one, other = (uniforms(stream_keys([seed]), np.arange(5000)) for seed in (1, 2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.06
    assert not set(one) & set(other)


def test_seeds_of_any_size_and_sign() -> None:
    keys = stream_keys([0, -1, 1 << 80, (1 << 80) + 1])
    assert len(set(keys.tolist())) == 4 or keys[0] == keys[2]  # only the low 64 bits count
    assert keys[0] != keys[1] and keys[2] != keys[3]


@given(st.integers(-(2**63), 2**63), st.integers(0, 10_000))
def test_uniform_numbers_are_in_range_and_reproducible(seed: int, index: int) -> None:
    (number,) = uniforms(stream_keys([seed]), np.array([index]))
    assert 0 <= number < 1
    assert number == uniforms(stream_keys([5, seed]), np.array([index]))[1]


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, -1)
    points = torch.tensor([[0.0], [0.5], [0.25], [1 - 2.0**-48]], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, points, Sampling.of([1.0] * 4, CPU))
    assert tokens.squeeze(1).tolist() == [1, 3, 1, 3]
    torch.testing.assert_close(logprobs, torch.full((4, 1), 0.5, dtype=torch.float64).log())


def test_greedy_and_tempered_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 3)
    points = torch.full((3, 1), 0.999999, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, points, Sampling.of([0.0, 1.0, 0.25], CPU))
    assert tokens.squeeze(1).tolist() == [1, 2, 2]
    expected = torch.stack(
        [torch.log_softmax(logits[0].double() / t, -1)[k] for t, k in ((1, 1), (1, 2), (0.25, 2))]
    )
    torch.testing.assert_close(logprobs.squeeze(1), expected)


def test_a_tiny_temperature_does_not_overflow() -> None:
    tokens, logprobs = sample_tokens(
        torch.tensor([[1e3, 2e3, -1e3]]),
        torch.tensor([[0.5]], dtype=torch.float64),
        Sampling.of([1e-30], CPU),
    )
    assert (tokens.item(), logprobs.item()) == (1, 0.0)


def test_a_row_of_nan_has_a_logprob_of_nan() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    tokens, logprobs = sample_tokens(
        logits, torch.full((2, 1), 0.5, dtype=torch.float64), Sampling.of([1.0] * 2, CPU)
    )
    assert logprobs.isfinite().squeeze(1).tolist() == [True, False]
    assert 0 <= int(tokens[1]) < 2
