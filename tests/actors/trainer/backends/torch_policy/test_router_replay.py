"""A policy that replays an engine's experts: its gradient is that of a model whose routers choose them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from flexmarl.actors.errors import UnsupportedModel
from flexmarl.actors.expert_routes import ROUTES_COLUMN
from flexmarl.actors.messages import LoraConfig, Sample
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank
from flexmarl.actors.trainer.backends.torch_policy.held_samples import HeldSample, pack_held, read_held
from flexmarl.actors.trainer.backends.torch_policy.row_routes import row_routes
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .conversations import make_conversations
from .gang_cases import error
from .policies import make_samples
from .ranks import STEP, Call, Ranks, Trained, gang_setup, load_state, made_policy, state_of, train

EXPERTS, LAYERS = 6, 2
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "experts_implementation": "eager",
}  # fmt: skip
"""The other implementations have no float64."""
ALGORITHM = {"name": "dapo"}


def replaying(setup: PolicySetup) -> PolicySetup:
    return setup.model_copy(update={"model": setup.real_model.model_copy(update={"router_replay": True})})


def mixture_setup(algorithm: dict[str, Any] = ALGORITHM, **settings: Any) -> PolicySetup:
    return replaying(gang_setup(algorithm, **MIXTURE | settings))


def routed(samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """Samples with any experts. Those of a token are the same in all samples that begin with it."""
    rng = np.random.default_rng(seed)
    of_beginning: dict[tuple[int, ...], NDArray[Any]] = {}

    def routes(tokens: tuple[int, ...]) -> NDArray[Any]:
        rows = []
        for end in range(1, len(tokens)):
            experts = of_beginning.setdefault(
                tokens[:end],
                np.array([rng.permutation(EXPERTS)[:2] for _ in range(LAYERS)], np.uint8),
            )
            rows.append(experts)
        return np.stack(rows)

    return [
        replace(sample, columns={ROUTES_COLUMN: routes(sample.prompt_tokens + sample.tokens)})
        for sample in samples
    ]


def calls_of(samples: Sequence[Sample]) -> list[Call]:
    return [("accumulate", list(samples[:20])), ("accumulate", list(samples[20:]))]


SAMPLES = routed(make_conversations(0))


@contextmanager
def given(experts: NDArray[Any]) -> Iterator[None]:
    """Within it routers of transformers choose ``experts`` ``[tokens, layers, 2]``, layer by layer."""
    layers = iter(range(LAYERS))

    def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        chosen = torch.from_numpy(experts[:, next(layers)].astype(np.int64))
        weights = torch.stack([row[picks] for row, picks in zip(scores.softmax(-1), chosen, strict=True)])
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return scores, weights, chosen

    with mock.patch.object(Qwen3MoeTopKRouter, "forward", forward):
        yield


def test_the_log_probabilities_are_those_of_routers_that_choose_the_same() -> None:
    setup = mixture_setup({"name": "dapo", "entropy_coefficient": 0.1})
    policy = made_policy(ALONE, setup.model_copy(update={"compared_share": 1.0}), None)
    plain = made_policy(ALONE, gang_setup({"name": "dapo"}, **MIXTURE), None)
    policy.accumulate(SAMPLES)
    compared = policy.take_compared()
    assert compared.keys() == {sample.sample_id for sample in SAMPLES}
    for sample in SAMPLES:
        tokens = torch.tensor([sample.prompt_tokens + sample.tokens])
        cut = sample.truncation
        if cut is not None:
            continue  # of the same logits
        with given(sample.columns[ROUTES_COLUMN]), torch.no_grad():
            logits = plain.model(tokens[:, :-1]).logits[0, len(sample.prompt_tokens) - 1 :]
        logprobs = (logits / sample.temperature).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        logprobs_here = np.array(sample.logprobs) + compared[sample.sample_id].differences
        assert logprobs_here == pytest.approx(expected.numpy(), abs=5e-3)  # the record rounds them


@pytest.fixture(scope="module")
def padded() -> Trained:
    return train(ALONE, mixture_setup(trainer=TorchTrainerConfig(packing=False)), calls_of(SAMPLES))


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"activation_checkpointing": True},
        {"tokens_per_forward": 40},
        {"activation_checkpointing": True, "packing": False, "tokens_per_forward": 40},
    ],
    ids=["packed", "recomputed", "several forwards", "all"],
)
def test_any_forward_has_the_same_gradient(trainer: dict[str, Any], padded: Trained) -> None:
    setup = mixture_setup(trainer=TorchTrainerConfig(**trainer))
    trained = train(ALONE, setup, calls_of(SAMPLES))
    assert error(trained.gradients, padded.gradients) < 1e-6
    gates = [name for name in trained.gradients if name.endswith("gate.weight")]
    assert len(gates) == LAYERS and all(np.abs(trained.gradients[name]).max() > 1e-6 for name in gates)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_same_gradient(size: int, padded: Trained) -> None:
    ranks = Ranks(size)
    try:
        results = ranks.run(size, train, mixture_setup(), calls_of(SAMPLES))
    finally:
        ranks.close()
    for trained in results:
        assert error(trained.gradients, padded.gradients) < 1e-6


def test_other_experts_are_another_gradient_and_unknown_ones_are_the_routers(padded: Trained) -> None:
    other = train(ALONE, mixture_setup(), calls_of(routed(make_conversations(0), seed=1)))
    assert error(other.gradients, padded.gradients) > 0.05
    routers = train(ALONE, gang_setup(ALGORITHM, **MIXTURE), calls_of(make_conversations(0)))
    unknown = [
        replace(sample, columns={ROUTES_COLUMN: np.full_like(sample.columns[ROUTES_COLUMN], 255)})
        for sample in SAMPLES
    ]
    for samples in (make_conversations(0), unknown):
        assert error(train(ALONE, mixture_setup(), calls_of(samples)).gradients, routers.gradients) < 1e-9


def test_references_and_critics_choose_their_experts() -> None:
    """Their figures don't depend on the routes of the policy."""
    for algorithm in ({"name": "grpo", "kl_coefficient": 0.1}, {"name": "ppo", "kl_coefficient": 0.1}):
        setups = mixture_setup(algorithm), gang_setup(algorithm, **MIXTURE)
        with_routes, without = (
            train(ALONE, setup, [("accumulate", samples), STEP])
            for setup, samples in zip(setups, (SAMPLES, make_conversations(0)), strict=True)
        )
        for name, gradient in without.gradients.items():
            if name.startswith("critic_gradient/"):
                assert error({name: with_routes.gradients[name]}, {name: gradient}) < 1e-6


def test_an_adapter_replays_in_its_base() -> None:
    lora = LoraConfig(rank=3, alpha=7, targets=("q_proj", "o_proj"))
    first, second = (
        train(ALONE, mixture_setup(lora=lora), calls_of(routed(make_conversations(0), seed)))
        for seed in (0, 1)
    )
    assert error(first.gradients, second.gradients) > 0.05


def test_the_share_of_tokens_that_were_replayed_is_a_figure() -> None:
    """The token before each trained one decides: the last of a prompt for the first of its answer."""
    samples = [plain_sample(3, 4, two_layers(6)), plain_sample(2, 6, None)]
    samples = [replace(row, sample_id=f"1:q_{n}_0", advantage=1.0) for n, row in enumerate(samples)]
    samples[0].columns[ROUTES_COLUMN][2:4] = 255  # of the first two answer tokens
    for packing in (True, False):
        policy = made_policy(ALONE, mixture_setup(trainer=TorchTrainerConfig(packing=packing)), None)
        policy.accumulate(samples[:1])
        policy.accumulate(samples[1:])
        assert policy.optimizer_step().figures["replayed_share"] == pytest.approx(2 / 10)
    without = made_policy(ALONE, gang_setup(ALGORITHM, **MIXTURE), None)
    without.accumulate(samples[1:])
    assert "replayed_share" not in without.optimizer_step().figures


def share_of(gang: GangRank, setup: PolicySetup, samples: list[Sample]) -> float:
    policy = made_policy(gang, setup, None)
    policy.accumulate(samples)
    return float(policy.optimizer_step().figures["replayed_share"])


def test_ranks_and_later_updates_count_all_tokens() -> None:
    """Every third sample comes without experts."""
    samples = [
        replace(row, columns={}) if number % 3 == 0 else row
        for number, row in enumerate(routed(make_samples(0)))
    ]
    trained = [row for row in samples if row.advantage]
    replayed = sum(len(row.tokens) for row in trained if row.columns)
    expected = pytest.approx(replayed / sum(len(row.tokens) for row in trained))
    for updates in (1, 2):
        setup = mixture_setup(updates=updates)
        assert share_of(ALONE, setup, samples) == expected
        ranks = Ranks(3)
        try:
            assert ranks.run(3, share_of, setup, samples) == [expected] * 3
        finally:
            ranks.close()


def test_later_updates_replay_what_was_held_also_behind_a_move() -> None:
    setup = mixture_setup(updates=2)
    policy, moved, forgetful = (made_policy(ALONE, setup, None) for _ in range(3))
    policy.accumulate(SAMPLES)
    load_state(moved, [state_of(policy)])
    forgetful.accumulate(make_conversations(0))
    norms = [part.optimizer_step().figures["grad_norm"] for part in (policy, moved, forgetful)]
    assert norms[1] == norms[0] != pytest.approx(norms[2], rel=1e-2)


def test_held_samples_keep_their_routes() -> None:
    sample = replace(SAMPLES[3], columns=SAMPLES[3].columns | {"spread": np.ones(2, np.float32)})
    (held,) = read_held(pack_held([HeldSample(sample)]))
    assert held.sample.columns.keys() == sample.columns.keys()
    for name, values in sample.columns.items():
        assert held.sample.columns[name].dtype == values.dtype
        assert np.array_equal(held.sample.columns[name], values)


# ----------------------------------------------------------------------- the routes of rows


def plain_sample(prompt: int, tokens: int, routes: NDArray[Any] | None) -> Sample:
    columns = {} if routes is None else {ROUTES_COLUMN: routes}
    return Sample(
        "1:q_0_0",
        "solver",
        0,
        0,
        "1:q",
        0.0,
        1.0,
        (1,) * prompt,
        (2,) * tokens,
        (0.0,) * tokens,
        columns=columns,
    )


def two_layers(tokens: int) -> NDArray[Any]:
    return np.full((tokens, LAYERS, 2), (4, 1), np.uint8)


def filled(tokens: int, expert: int) -> NDArray[Any]:
    return np.full((tokens, 1, 1), expert, np.uint8)


@pytest.mark.parametrize("packed", [True, False])
def test_a_token_has_the_routes_of_the_turn_that_generated_it(packed: bool) -> None:
    first, second = plain_sample(2, 2, filled(3, 7)), plain_sample(5, 3, filled(7, 9))
    alone, unknown = plain_sample(1, 2, filled(2, 4)), plain_sample(2, 2, None)
    routes = row_routes([[first, second], [alone], [unknown]], packed=packed)
    assert routes is not None and not routes.was_read
    rows = [[7] * 3 + [9] * 4, [4] * 2, [-1] * 3]
    width = 0 if packed else 7
    assert routes.experts.ravel().tolist() == [
        expert for row in rows for expert in row + [-1] * (width - len(row))
    ]
    assert row_routes([[unknown]], packed=packed) is None


def test_routes_of_other_tokens_or_models_are_refused() -> None:
    with pytest.raises(ValueError, match="sample 1:q_0_0: routes of 3 tokens, and it has 4 but the last"):
        row_routes([[plain_sample(2, 3, filled(3, 1))]], packed=True)
    wide = np.zeros((3, 2, 1), np.uint8)
    with pytest.raises(ValueError, match="routes of several shapes"):
        row_routes([[plain_sample(2, 2, wide)], [plain_sample(2, 2, filled(3, 1))]], packed=True)


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="router_replay is for mixtures of experts"):
        made_policy(ALONE, replaying(gang_setup(ALGORITHM)), None)
