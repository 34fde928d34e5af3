"""Turns that extend each other are one row: the gradients and figures of a row for each, with fewer tokens."""

import random
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

from flexmarl.actors.messages import Sample
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.policy_backend import TrainingStep
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE
from flexmarl.actors.trainer.padding import PaddedRows, TokenRow, TokenRows
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from ...users_losses import LEAVE_ONE_OUT
from .conversations import each_sample_a_row, make_conversations
from .gang_cases import SETUPS, error, same_stats
from .policies import gradient, make_policy, relative_error
from .ranks import STEP, Call, Ranks, Trained, gang_setup, train
from .test_packed_attention import MORE_MODELS, REFUSED, made, numbers, same

BIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
       "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 16, "max_position_embeddings": 64,
       "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
WINDOWS: dict[str, dict[str, Any]] = {
    name: BIG | {"num_experts_per_tok": 2} | REFUSED[name][0]
    for name in ("window", "windows of some layers", "own code", "linear")
}
_SAME_FORWARD = ("tied", "deep", "published adapter")
OBJECTIVES = {name: setup for name, setup in SETUPS.items() if name not in _SAME_FORWARD} | {
    "gspo": gang_setup({"name": "gspo"}),
    "cispo": gang_setup({"name": "cispo", "correction": "icepop"}),
    "mean of sequences": gang_setup({"name": "grpo", "aggregation": "sequence_mean", "kl_coefficient": 0.1}),
    "decoupled": gang_setup({"name": "dapo", "correction": "decoupled"}),
    "reinforce": gang_setup({"name": "rloo", "kl_coefficient": 0.1}),
    "columns of a users loss": gang_setup(
        {"name": "dapo", "loss": LEAVE_ONE_OUT, "loss_columns": ("spread",)}
    ),
    "padded": gang_setup({"name": "dapo"}, trainer=TorchTrainerConfig(packing=False)),
    "padded critic": gang_setup(
        {"name": "ppo", "kl_coefficient": 0.1}, trainer=TorchTrainerConfig(packing=False)
    ),
    "several forwards": gang_setup({"name": "dapo"}, trainer=TorchTrainerConfig(tokens_per_forward=40)),
}


def with_columns(samples: list[Sample], setup: PolicySetup) -> list[Sample]:
    """A column has another value at each token of a sample."""
    if not setup.loss.loss_columns:
        return samples
    return [
        replace(sample, columns={"spread": np.linspace(0.5, 2, len(sample.tokens), dtype=np.float32)})
        for sample in samples
    ]


def calls_of(setup: PolicySetup) -> list[Call]:
    first, second = (with_columns(make_conversations(seed, version=seed), setup) for seed in (0, 1))
    random.Random(0).shuffle(first)
    return [("accumulate", first), STEP, ("accumulate", second[:20]), ("accumulate", second[20:]), STEP]


def same_steps(found: Trained, expected: Trained, rel: float = 1e-6) -> None:
    assert error(found.gradients, expected.gradients) < rel
    assert error(found.weights, expected.weights) < rel
    for merged, alone in zip(found.results, expected.results, strict=True):
        if isinstance(merged, tuple):
            assert merged == alone
            continue
        assert alone.figures["merged_share"] == 0.0 < 0.3 < merged.figures["merged_share"] < 0.7
        figures = {name: value for name, value in merged.figures.items() if name != "merged_share"}
        of_rows = {name: value for name, value in alone.figures.items() if name != "merged_share"}
        same_stats(replace(merged, figures=figures), replace(alone, figures=of_rows))


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_merged_turns_have_the_gradient_the_step_and_the_figures_of_a_row_each(kind: str) -> None:
    setup = OBJECTIVES[kind]
    found = train(ALONE, setup, calls_of(setup))
    with each_sample_a_row():
        expected = train(ALONE, setup, calls_of(setup))
    assert expected.results[-1].figures["grad_norm"] > 1e-4
    same_steps(found, expected)


@pytest.mark.parametrize(
    ("kind", "size"),
    [*zip(["critic", "held", "updates", "adapter", "users loss", "padded"], cycle([4, 2]), strict=False)],
)
def test_turns_are_merged_on_any_number_of_ranks(ranks: Ranks, kind: str, size: int) -> None:
    setup = OBJECTIVES[kind]
    found: list[Trained] = ranks.run(size, train, setup, calls_of(setup))
    assert all(each.results == found[0].results for each in found)
    with each_sample_a_row():
        expected = train(ALONE, setup, calls_of(setup))
    same_steps(found[0], expected)
    alone = train(ALONE, setup, calls_of(setup))
    shares = [trained.results[-1].figures["merged_share"] for trained in (found[0], alone)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-12), "a trajectory is one rank's"


def test_a_policy_that_is_suspended_within_a_step_takes_the_step_bit_for_bit() -> None:
    samples = make_conversations(3)
    whole, first, second = make_policy(), make_policy(), make_policy()
    for policy in (whole, first):
        policy.accumulate(samples[:18])
    state = first.step_state()
    second.load_state(TrainingStep({name: t.clone() for name, t in state.tensors.items()}, state.data))
    for policy in (whole, second):
        policy.accumulate(samples[18:])
    stepped, resumed = whole.optimizer_step(), second.optimizer_step()
    assert resumed == stepped and stepped.figures["merged_share"] > 0.3
    assert all(torch.equal(second.weights()[name], weights) for name, weights in whole.weights().items())


@pytest.mark.parametrize("packing", [False, True])
def test_the_share_is_that_of_the_tokens_that_are_not_computed(packing: bool) -> None:
    """Three turns: 2 + 1, then 4 + 2, then 7 + 1 tokens; another sample has 3, and one without a signal counts not."""
    policy = make_policy(trainer=TorchTrainerConfig(packing=packing))
    base = make_conversations(0)[0]
    turns = [((1, 2), (3,)), ((1, 2, 3, 4), (5, 6)), ((1, 2, 3, 4, 5, 6, 7), (8,)), ((1,), (2, 3))]
    samples = [
        replace(base, sample_id=f"1:q_{number}_0", prompt_tokens=prompt, tokens=tokens, advantage=1.0,
                logprobs=(-2.5,) * len(tokens))
        for number, (prompt, tokens) in enumerate(turns)
    ]  # fmt: skip
    policy.accumulate([*samples, replace(samples[-1], advantage=0.0)])
    totals = policy._position.totals
    assert (totals.trained_tokens, totals.samples) == (6, 5)
    assert totals.positions - totals.sums["padding_share"] == pytest.approx((8 - 1) + (3 - 1), abs=1)
    assert policy.optimizer_step().figures["merged_share"] == pytest.approx(9 / 20)


def merged_and_alone() -> tuple[PaddedRows, PaddedRows]:
    """The turns of a conversation whose length exceeds a window of attention, as one padded row and as several."""
    rng = random.Random(0)
    rows: list[TokenRow] = []
    tokens: tuple[int, ...] = ()
    for _ in range(4):
        prompt = (*tokens, *(rng.randrange(3, 16) for _ in range(3)))
        rows.append((prompt, tuple(rng.randrange(3, 16) for _ in range(4))))
        tokens = prompt + rows[-1][1]
    alone = TokenRows.of(rows, 16)
    merged, members = alone.merged()
    assert members == [[0, 1, 2, 3]]
    return merged.padded(np.arange(1)), alone.padded(np.arange(4))


@pytest.mark.parametrize("name", [*MORE_MODELS, *WINDOWS])
def test_any_model_computes_the_turns_of_a_row_as_rows_of_their_own(name: str) -> None:
    """Also those that can't lie end to end: with windows of attention, and with a state."""
    model = made((MORE_MODELS | WINDOWS)[name])
    merged, alone = merged_and_alone()
    same(numbers(model, merged), numbers(model, alone), 1e-6)


def test_two_branches_train_each_token_once() -> None:
    """The gradient is that of the samples one by one."""
    samples = make_conversations(5)
    merged, one_by_one = make_policy(), make_policy()
    merged.accumulate(samples)
    for sample in samples:
        one_by_one.accumulate([sample])
    assert relative_error(gradient(merged), gradient(one_by_one)) < 1e-5
    totals, alone = merged._position.totals, one_by_one._position.totals
    assert (totals.trained_tokens, totals.sample_tokens) == (alone.trained_tokens, alone.sample_tokens)
    assert totals.positions < 0.7 * alone.positions
