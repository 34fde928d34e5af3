"""Truncated distributions: the tokens that are left, by a plain computation, and the ones that rounding may change."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors import truncated_scores
from flexmarl.actors.messages import Truncation
from flexmarl.actors.trainer.objective.loss import token_logprobs, token_logprobs_and_entropies
from flexmarl.actors.truncated_scores import Truncations

CPU = torch.device("cpu")
ROUNDING = 1e-5
truncations = st.builds(
    Truncation,
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
)


def plain_support(scores: Sequence[float], cut: Truncation) -> set[int]:
    """The tokens that are left, step by step."""
    left = {token: math.exp(score) for token, score in enumerate(scores)}
    left = {token: weight for token, weight in left.items() if weight >= cut.min_p * max(left.values())}
    by_weight = sorted(left, key=left.__getitem__, reverse=True)
    by_weight = by_weight[: cut.top_k or None]
    total = sum(left[token] for token in by_weight)
    kept, mass = set[int](), 0.0
    for token in by_weight:
        if mass < cut.top_p * total or cut.top_p == 1:
            kept.add(token)
        mass += left[token]
    return kept


def scores_of(seed: int, rows: int, vocabulary: int = 12) -> torch.Tensor:
    return 3 * torch.randn(
        rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def in_trainer(cuts: Sequence[Truncation]) -> Truncations:
    return Truncations.of(cuts, CPU).repeated([1] * len(cuts), ROUNDING)


@pytest.mark.parametrize("first_ranks", [2, 5, 1024])
@given(st.integers(0, 1000), st.lists(truncations, min_size=1, max_size=5))
def test_the_tokens_of_each_row_are_those_of_the_plain_computation(
    first_ranks: int, seed: int, cuts: list[Truncation]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(truncated_scores, "_FIRST_RANKS", first_ranks)
        check_tokens(seed, cuts)


def check_tokens(seed: int, cuts: list[Truncation]) -> None:
    scores = scores_of(seed, len(cuts))
    left = (
        Truncations.of(cuts, CPU).masked(scores).isfinite() if not all(c.leaves_all for c in cuts) else None
    )
    for row, cut in enumerate(cuts):
        found = set(range(12)) if left is None else set(left[row].nonzero().flatten().tolist())
        assert found == plain_support(scores[row].tolist(), cut)


def test_a_share_of_more_tokens_than_are_ranked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncated_scores, "_FIRST_RANKS", 3)
    weights = [10.0, 1.9, 1.85, 1.8, 1.75, 1.7, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    scores = torch.tensor([weights, weights], dtype=torch.float64).log()
    # 10 is more than half of the first six and less than half of all
    left = Truncations.of([Truncation(top_k=6, top_p=0.5), Truncation(top_p=0.5)], CPU).masked(scores)
    assert left.isfinite().sum(-1).tolist() == [1, 2]


@pytest.mark.parametrize("first_ranks", [3, 1024])
@given(st.integers(0, 1000), truncations.filter(lambda cut: not cut.leaves_all))
def test_a_distribution_is_unsure_exactly_if_small_changes_of_its_scores_change_its_tokens(
    first_ranks: int, seed: int, cut: Truncation
) -> None:
    scores = scores_of(seed, 1)
    cuts = in_trainer([cut])
    (drawn,) = scores.argmax(-1).tolist()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(truncated_scores, "_FIRST_RANKS", first_ranks)
        cuts.masked_but(scores, torch.tensor([drawn]))
    assert cuts.unsure is not None
    if not cuts.unsure.item():
        for change in range(20):
            moved = scores + 0.2 * ROUNDING * (2 * torch.rand_like(scores) - 1) * (change > 0)
            assert plain_support(moved[0].tolist(), cut) == plain_support(scores[0].tolist(), cut)


@pytest.mark.parametrize(
    ("cut", "scores"),
    [
        (Truncation(top_k=2), [2.0, 1.0, 1.0 - 1e-6, 0.0]),
        (Truncation(top_k=2), [2.0, 1.0, 1.0, 0.0]),
        (Truncation(min_p=0.5), [1.0, 1.0 + math.log(0.5) + 1e-6, 0.0, -1.0]),
        (Truncation(min_p=0.5), [1.0, 1.0 + math.log(0.5) - 1e-6, 0.0, -1.0]),
        (Truncation(top_p=0.75), [math.log(0.5), math.log(0.25), math.log(0.25)]),
    ],
)
def test_an_edge_within_the_rounding_is_found(cut: Truncation, scores: list[float]) -> None:
    cuts = in_trainer([cut])
    cuts.masked_but(torch.tensor([scores]), torch.tensor([0]))
    assert cuts.unsure is not None and cuts.unsure.tolist() == [True]


def test_a_token_outside_of_the_support_is_counted_and_keeps_a_probability() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    cuts = in_trainer([Truncation(top_k=1)] * 2)
    logprobs = token_logprobs(scores, torch.tensor([0, 2]), 1.0, cuts)
    assert cuts.unsure is not None and cuts.unsure.tolist() == [False, True]
    assert logprobs.tolist() == pytest.approx([0.0, -math.log(1 + math.exp(2))])


def test_the_gradient_is_that_of_the_truncated_softmax() -> None:
    scores = scores_of(5, 3).requires_grad_()
    cuts = [Truncation(top_k=4), Truncation(top_p=0.8), Truncation(min_p=0.1)]
    tokens = scores.argmax(-1)
    torch.autograd.backward(token_logprobs(scores, tokens, 0.7, in_trainer(cuts)).sum())
    found, scores.grad = scores.grad, None
    for row, cut in enumerate(cuts):
        left = sorted(plain_support((scores[row] / 0.7).tolist(), cut))
        torch.autograd.backward((scores[row, left] / 0.7).log_softmax(-1)[left.index(int(tokens[row]))])
    torch.testing.assert_close(found, scores.grad)
    assert found is not None and found.eq(0).any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "cut", [Truncation(), Truncation(top_k=4), Truncation(top_p=0.8), Truncation(min_p=0.2)], ids=str
)
def test_the_entropy_and_its_gradient_are_those_of_the_sum_over_the_vocabulary(
    cut: Truncation, temperature: float
) -> None:
    logits = torch.randn((3, 9), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits[0, 4] -= 2000.0  # a token without a probability
    logits.requires_grad_()
    tokens = logits.argmax(-1)
    weights = torch.tensor([[0.5, -0.3], [1.0, 2.0], [0.0, 7.0]], dtype=torch.float64)
    cuts = in_trainer([cut] * 3) if cut != Truncation() else None
    found = token_logprobs_and_entropies(logits, tokens, temperature, cuts)
    torch.autograd.backward((weights * found).sum())
    gradient, logits.grad = logits.grad, None

    expected = []
    for row, token in zip(logits, tokens.tolist(), strict=True):
        scores = [score / temperature for score in row]
        kept = plain_support([score.item() for score in scores], cut)
        total = sum((scores[index].exp() for index in sorted(kept)), torch.zeros(()))
        entropy = torch.zeros((), dtype=torch.float64)
        for index in sorted(kept):
            if probability := (scores[index].exp() / total):
                entropy = entropy - probability * probability.log()
        expected.append(torch.stack([(scores[token].exp() / total).log(), entropy]))
    torch.testing.assert_close(found, torch.stack(expected))
    torch.autograd.backward((weights * torch.stack(expected)).sum())
    torch.testing.assert_close(gradient, logits.grad)


def test_parts_write_into_the_whole() -> None:
    cuts = in_trainer([Truncation(top_k=1), Truncation(top_k=2), Truncation(top_k=3)])
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3)
    for part, of_part in zip(cuts.split(2), (slice(0, 2), slice(2, 3)), strict=True):
        part.masked_but(scores[of_part], torch.tensor([1, 1, 1])[of_part])
    assert cuts.unsure is not None and cuts.unsure.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("cut", "key"),
    [
        (Truncation(top_k=-1), "top_k"), (Truncation(top_p=0.0), "top_p"), (Truncation(top_p=1.1), "top_p"),
        (Truncation(top_p=math.nan), "top_p"), (Truncation(min_p=1.0), "min_p"), (Truncation(min_p=-0.1), "min_p"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_named(cut: Truncation, key: str) -> None:
    problem = cut.problem()
    assert problem is not None and problem.startswith(f"{key} is ")
    assert Truncation(5, 0.5, 0.5).problem() is None
