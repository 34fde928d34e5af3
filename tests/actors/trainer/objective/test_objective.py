"""Every algorithm against its formula written out in loops, over steps cut into micro-batches in any way."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations
from statistics import fmean, pvariance
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexmarl.actors.messages import Sample
from flexmarl.actors.names import AgentName
from flexmarl.actors.trainer.objective.critic import explained_variance, value_loss, value_sums
from flexmarl.actors.trainer.objective.loss import denominator
from flexmarl.actors.trainer.objective.objective import (
    CompletionTokens,
    batch_loss,
    critic_advantages,
    idle_loss,
    step_advantages,
)
from flexmarl.actors.trainer.trainer_config import LossConfig

from ..algorithm import Algorithm, algorithm, as_closed
from ..plain_objective import Row, plain_advantages, plain_loss, tokens

torch.set_num_threads(1)
CONFIGS: tuple[dict[str, Any], ...] = (
    {"name": "grpo"},
    {"name": "grpo", "kl_coefficient": 0.04},
    {"name": "grpo", "aggregation": "token_mean", "correction": "none"},
    {"name": "grpo", "correction": "icepop", "correction_low": 0.8, "correction_high": 1.3},
    {"name": "grpo", "correction": "decoupled", "correction_high": 1.2, "kl_coefficient": 0.1},
    {"name": "dr_grpo", "constant_length": 12},
    {"name": "dapo"},
    {"name": "gspo"},
    {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2, "kl_coefficient": 0.1, "kl_estimator": "k2"},
    {"name": "cispo", "clip_high": 0.1},
    {"name": "cispo", "clip_low": 0.1, "clip_high": 0.1, "correction": "icepop", "correction_low": 0.9},
    {"name": "rloo"},
    {"name": "rloo", "kl_coefficient": 0.05},
    {"name": "rloo", "correction": "tis", "correction_high": 1.1},
    {"name": "reinforce_pp"},
    {"name": "reinforce_pp", "kl_coefficient": 0.1},
    {"name": "reinforce_pp_baseline"},
    {"name": "reinforce_pp_baseline", "kl_coefficient": 0.1},
    {"name": "at_grpo"},
    {"name": "at_grpo", "rewards": "turn"},
    *(
        {"name": name, "rewards": "both"}
        for name in ("grpo", "dapo", "gspo", "reinforce_pp_baseline", "rloo")
    ),
    {"name": "rloo", "rewards": "both", "kl_coefficient": 0.05},
    {"name": "dr_mas", "scale_rewards": False},
    {"name": "rae"},
    {"name": "rae", "kl_coefficient": 0.1, "rewards": "both"},
    {"name": "ppo"},
    {"name": "ppo", "kl_coefficient": 0.1, "critic": {"gamma": 0.9, "lam": 0.5}},
    {
        "name": "ppo",
        "kl_coefficient": 0.1,
        "kl_in_reward": False,
        "kl_estimator": "k3",
        "correction": "tis",
    },
)


def make_step(seed: int, queries: int = 3, trajectories: int = 4, *, turn_rewards: bool = False) -> list[Row]:
    """Trajectories in which the agent takes one or two turns of uneven length; some groups have equal rewards.
    ``turn_rewards``: each turn's reward is another one."""
    rng = random.Random(seed)
    rows = []
    for query in range(queries):
        rewards = tuple(rng.choice((0.0, 0.5, 1.0)) for _ in range(trajectories))
        for trajectory in range(trajectories):
            for turn in range(rng.randint(1, 2)):
                own = rng.choice((0.0, 0.25, 0.5)) if turn_rewards else 0.0
                drawn = tuple(rng.uniform(-3, -0.1) for _ in range(rng.randint(1, 6)))
                group = f"1:q{query}"
                sample = Sample(
                    f"{group}_{turn}_{trajectory}", "solver", 1, 0, group, rewards[trajectory] + own, 0.0,
                    (1,), (2,) * len(drawn), drawn,
                )  # fmt: skip
                near = tuple(logprob + rng.uniform(-0.4, 0.4) for logprob in drawn)
                reference = tuple(logprob + rng.uniform(-1, 1) for logprob in drawn)
                rows.append(Row(sample, rewards, near, reference, tuple(rng.uniform(-1, 1) for _ in drawn)))
    return rows


# --------------------------------------------------------------------------- the trainer's functions


def as_grouped(config: Algorithm, rows: Sequence[Row]) -> list[Sample]:
    """The samples as the rollout sends them, group by group when each closes."""
    return as_closed([row.sample for row in rows], {AgentName("solver"): config.credit})


def token_advantages(config: Algorithm, rows: Sequence[Row]) -> list[Tensor]:
    samples = as_grouped(config, rows)
    if config.loss.critic is not None:
        return [advantages_and_returns(config, [row])[0] for row in rows]
    if config.loss.streams:
        return [
            torch.full((len(row.logprobs),), sample.advantage, dtype=torch.float64)
            for row, sample in zip(rows, samples, strict=True)
        ]
    references = [torch.tensor(row.reference, dtype=torch.float64) for row in rows]
    arrived = [sample.advantage for sample in samples]
    found = step_advantages(config.loss, {AgentName("solver"): config.credit}, samples, arrived, references)
    return list(torch.split(found, [len(row.logprobs) for row in rows]))


def advantages_and_returns(config: Algorithm, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    return critic_advantages(
        config.loss,
        torch.tensor([row.sample.reward for row in rows]),
        tokens(rows, lambda row: row.values),
        torch.tensor([len(row.logprobs) for row in rows]),
        max(len(row.logprobs) for row in rows),
        tokens(rows, lambda row: row.sample.logprobs),
        tokens(rows, lambda row: row.reference),
    )


def accumulated(config: Algorithm, batches: Sequence[Sequence[Row]]) -> tuple[float, dict[str, list[float]]]:
    """The step's mean loss, and the gradient by each sample's log-probabilities, divided once."""
    rows = [row for batch in batches for row in batch]
    advantages = dict(
        zip((row.sample.sample_id for row in rows), token_advantages(config, rows), strict=True)
    )
    divisor = denominator(
        config.loss.aggregation,
        tokens=sum(len(row.logprobs) for row in rows),
        sequences=len(rows),
        constant=config.loss.constant_length,
    )
    loss, gradients = 0.0, {}
    for batch in batches:
        leaves = [torch.tensor(row.logprobs, dtype=torch.float64, requires_grad=True) for row in batch]
        summed, sums = batch_loss(
            config.loss,
            CompletionTokens(
                logprobs=torch.cat(leaves),
                engine_logprobs=torch.tensor(
                    [lp for row in batch for lp in row.sample.logprobs], dtype=torch.float64
                ),
                advantages=torch.cat([advantages[row.sample.sample_id] for row in batch]),
                lengths=torch.tensor([len(row.logprobs) for row in batch]),
                group_sizes=torch.tensor([len(row.group_rewards) for row in batch]),
                rewards=torch.tensor([row.sample.reward for row in batch]),
                reference_logprobs=torch.tensor(
                    [lp for row in batch for lp in row.reference], dtype=torch.float64
                ),
            ),
        )
        torch.autograd.backward(summed)
        loss += sums["loss"].item()
        for row, leaf in zip(batch, leaves, strict=True):
            assert leaf.grad is not None
            gradients[row.sample.sample_id] = (leaf.grad / divisor).tolist()
    return loss / divisor, gradients


@pytest.mark.parametrize("given_config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
@settings(max_examples=10)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_any_split_gives_the_loss_and_gradient_of_the_formula(
    given_config: dict[str, Any], data: st.DataObject, seed: int
) -> None:
    config = algorithm(**given_config)
    rows = make_step(seed, turn_rewards=config.credit.used_rewards in ("turn", "both"))
    leaves = [
        [torch.tensor(lp, dtype=torch.float64, requires_grad=True) for lp in row.logprobs] for row in rows
    ]
    expected = plain_loss(config, rows, leaves)
    if expected.requires_grad:
        torch.autograd.backward(expected)

    loss, gradients = accumulated(config, cut(data, rows))

    assert loss == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    for row, leaf in zip(rows, leaves, strict=True):
        wanted = [0.0 if token.grad is None else token.grad.item() for token in leaf]
        assert gradients[row.sample.sample_id] == pytest.approx(wanted, rel=1e-6, abs=1e-10)


def cut(data: st.DataObject, rows: Sequence[Row]) -> list[list[Row]]:
    """``rows`` in any order, in micro-batches of any size."""
    mixed, batches = data.draw(st.permutations(rows)), []
    while mixed:
        size = data.draw(st.integers(1, len(mixed)))
        batches.append(mixed[:size])
        mixed = mixed[size:]
    return batches


@pytest.mark.parametrize("given_config", [c for c in CONFIGS if c["name"] == "ppo"], ids=str)
@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_any_split_gives_the_critics_loss_gradient_and_foresight(
    given_config: dict[str, Any], data: st.DataObject, seed: int
) -> None:
    config = algorithm(**given_config)
    rows = make_step(seed)
    count = sum(len(row.logprobs) for row in rows)
    targets, mistakes, wanted = [], [], {}
    for row, advantages in zip(rows, plain_advantages(config, rows), strict=True):
        returns = [a + v for a, v in zip(advantages, row.values, strict=True)]
        targets += returns
        mistakes += advantages
        wanted[row.sample.sample_id] = [(v - r) / count for v, r in zip(row.values, returns, strict=True)]

    total, sums = 0.0, torch.zeros(4, dtype=torch.float64)
    found: dict[str, list[float]] = {}
    for batch in cut(data, rows):
        leaves = [torch.tensor(row.values, dtype=torch.float64, requires_grad=True) for row in batch]
        _, returns_of = advantages_and_returns(config, batch)
        loss = value_loss(torch.cat(leaves), returns_of).sum()
        torch.autograd.backward(loss)
        total += loss.item()
        sums += value_sums(torch.cat(leaves), returns_of)
        for row, leaf in zip(batch, leaves, strict=True):
            assert leaf.grad is not None
            found[row.sample.sample_id] = (leaf.grad / count).tolist()

    assert total / count == pytest.approx(fmean(m**2 for m in mistakes) / 2, rel=1e-6)
    for name, gradient in wanted.items():
        assert found[name] == pytest.approx(gradient, rel=1e-6, abs=1e-10)
    expected = 1 - pvariance(mistakes) / pvariance(targets)
    assert explained_variance(count, sums) == pytest.approx(expected, rel=1e-6, abs=1e-9)


# --------------------------------------------------------------------------- edges


def one(logprobs: Sequence[float], engine: Sequence[float]) -> CompletionTokens:
    return CompletionTokens(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        engine_logprobs=torch.tensor(engine),
        advantages=torch.ones(len(logprobs)),
        lengths=torch.tensor([len(logprobs)]),
        group_sizes=torch.ones(1, dtype=torch.int64),
        rewards=torch.ones(1),
    )


def test_a_mask_that_removes_everything_leaves_a_gradient_of_exactly_nothing() -> None:
    config = LossConfig(name="grpo", correction="icepop", correction_low=0.5, correction_high=5.0)
    batch = one([-1.0, -2.0], [-9.0, -30.0])
    loss, sums = batch_loss(config, batch)
    torch.autograd.backward(loss)
    assert batch.logprobs.grad is not None and not batch.logprobs.grad.any()
    found = {name: value.item() for name, value in sums.items()}
    assert (found["loss"], found["clip_fraction"], found["entropy"]) == (0.0, 2.0, 3.0)
    assert (found["advantage_mean"], found["advantage_squares"], "kl" in found) == (2.0, 2.0, False)


@pytest.mark.parametrize(
    "config", [LossConfig(), LossConfig(name="dapo", old_policy="behaviour")], ids=["proximal", "behaviour"]
)
def test_a_forward_that_counts_for_nothing_has_the_names_of_all_sums_and_a_gradient_of_0(
    config: LossConfig,
) -> None:
    optional = ("reference_logprobs", "old_logprobs", "entropies")
    for present in chain.from_iterable(combinations(optional, count) for count in range(4)):
        tensors: dict[str, Any] = {
            name: torch.zeros(2, requires_grad=name == "entropies") for name in present
        }
        batch = replace(one([-1.0, -2.0], [-1.5, -2.0]), **tensors)
        loss, sums = idle_loss(config, batch)
        assert [*sums] == [*batch_loss(config, batch)[1]], present
        torch.autograd.backward(loss)
        for leaf in (batch.logprobs, batch.entropies):
            assert leaf is None or (leaf.grad is not None and not leaf.grad.any())


@pytest.mark.parametrize("given_config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
def test_a_step_of_one_group_of_one_or_of_equal_rewards_is_finite(given_config: dict[str, Any]) -> None:
    config = algorithm(**given_config)
    for trajectories in (1, 3):
        rows = [
            Row(Sample(f"1:q_0_{n}", "solver", 1, 0, "1:q", 1.0, 0.0, (1,), (2, 3), (-1.0, -500.0)),
                (1.0,) * trajectories, (-500.0, -1.0), (-1.0, -1.0), (0.0, 0.0))
            for n in range(trajectories)
        ]  # fmt: skip
        loss, gradients = accumulated(config, [rows])
        flat = list(chain.from_iterable(gradients.values()))
        assert math.isfinite(loss) and all(map(math.isfinite, flat))
        if not config.loss.kl_coefficient and not (config.loss.row.critic or config.loss.row.role_baseline):
            assert not any(flat), "equal rewards teach nothing"


def test_the_ratio_is_one_at_the_proximal_policy() -> None:
    """The clip refers to the proximal policy, at any distance of the behaviour policy, and holds nothing back."""
    config = LossConfig(name="dapo", correction="decoupled", correction_high=5.0)
    batch = one([-1.0, -1.0], [-1.5, -0.5])
    loss, sums = batch_loss(config, batch)
    torch.autograd.backward(loss)
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.tolist() == pytest.approx([-math.exp(0.5), -math.exp(-0.5)])
    assert sums["clip_fraction"].item() == 0.0
    uncorrected = one([-1.0, -1.0], [-1.5, -0.5])
    free, sums = batch_loss(LossConfig(name="dapo", correction="none"), uncorrected)
    torch.autograd.backward(free)
    assert uncorrected.logprobs.grad is not None
    assert uncorrected.logprobs.grad.tolist() == pytest.approx([-1.0, -1.0])
    assert sums["clip_fraction"].item() == 0.0


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "ppo", "rloo"])
def test_rounding_between_engine_and_trainer_changes_a_gradient_by_as_much_and_no_more(name: str) -> None:
    """1e-2, as in bfloat16: more than the clip range of GSPO, 3e-4, in which no gradient would be left."""
    config = LossConfig.model_validate({"name": name})
    equal, rounded = (
        one([-1.0, -2.0, -0.5], [-1.0, -2.0, -0.5]),
        one([-1.0, -2.0, -0.5], [-1.01, -2.01, -0.51]),
    )
    for batch in (equal, rounded):
        torch.autograd.backward(batch_loss(config, batch)[0])
    assert equal.logprobs.grad is not None and rounded.logprobs.grad is not None
    assert equal.logprobs.grad.norm() > 0.1
    assert torch.allclose(rounded.logprobs.grad, equal.logprobs.grad * math.exp(0.01), rtol=1e-4)


def test_a_kl_without_a_reference_is_refused() -> None:
    in_loss = LossConfig(name="grpo", kl_coefficient=0.1)
    with pytest.raises(ValueError, match="reference policy"):
        batch_loss(in_loss, one([-1.0], [-1.0]))
    with pytest.raises(ValueError, match="reference policy"):
        rloo = algorithm(name="rloo", kl_coefficient=0.1)
        step_advantages(rloo.loss, {AgentName("solver"): rloo.credit}, [make_step(0)[0].sample], [0.0], None)
    with pytest.raises(ValueError, match="reference policy"):
        critic_advantages(LossConfig.model_validate({"name": "ppo", "kl_coefficient": 0.1}), torch.ones(1),
                          torch.zeros(1), torch.tensor([1]), 1, torch.zeros(1), None)  # fmt: skip


@pytest.mark.parametrize("correction", ["tis", "icepop", "decoupled"])
@pytest.mark.parametrize("update", [0, 1])
def test_tokens_whose_behaviour_is_unknown_have_the_weight_1(correction: str, update: int) -> None:
    """Answers of a log without log-probs; the others of the batch are corrected. ``update``: of the step."""
    config = LossConfig.model_validate(
        {"name": "grpo", "correction": correction, "aggregation": "token_mean"}
    )
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64)
    behaviour = torch.tensor([-1.5, -1.75, math.nan, math.nan], dtype=torch.float64)
    gradients = []
    for engine in (behaviour, torch.where(behaviour.isnan(), old, behaviour)):
        logprobs = (old + 0.125 * update).requires_grad_()
        ones = torch.ones(4, dtype=torch.float64)
        tokens_of_batch = CompletionTokens(
            logprobs, engine, ones, torch.tensor([2, 2]), torch.tensor([2, 2]), torch.ones(2), None, old
        )
        loss, sums = batch_loss(config, tokens_of_batch)
        torch.autograd.backward(loss)
        assert logprobs.grad is not None and all(value.isfinite() for value in sums.values())
        gradients.append(logprobs.grad)
    assert torch.equal(*gradients)
    ratio = math.exp(0.125 * update)
    assert gradients[0][2:].tolist() == pytest.approx([-ratio] * 2)
