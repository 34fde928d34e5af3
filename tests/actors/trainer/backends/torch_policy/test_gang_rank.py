"""A policy of several ranks computes what one rank computes: gradients, steps, files, and moves to other gangs."""

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.errors import GangIncomplete, NonFiniteGradient, StaleSample
from flexmarl.actors.messages import Sample, StepStats
from flexmarl.actors.trainer.backends.torch_policy.gang_meeting import LOOPBACK, Meeting, Membership
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory

from ...users_losses import LEAVE_ONE_OUT
from .gang_cases import SETUPS, error, same_stats
from .policies import make_samples
from .ranks import (
    NAME,
    SEED,
    STEP,
    Call,
    Ranks,
    RankState,
    Trained,
    array,
    gang_setup,
    is_cut,
    made_policy,
    published,
    train,
    train_as_configured,
    train_in_chunks,
)


def cut(rng: random.Random, samples: list[Sample]) -> list[Call]:
    """Micro-batches of ``samples``, in any order and of any sizes: some have fewer samples than there are ranks."""
    mixed, calls = rng.sample(samples, len(samples)), []
    while mixed:
        size = rng.choice((1, 2, 3, 5, 9))
        calls.append(("accumulate", mixed[:size]))
        mixed = mixed[size:]
    return calls


@pytest.mark.parametrize(("kind", "size"), [*zip(SETUPS, cycle([4, 2]), strict=False)])
def test_any_order_split_and_number_of_ranks_gives_one_gradient_and_one_step(
    ranks: Ranks, kind: str, size: int
) -> None:
    rng = random.Random(size)
    first, second = make_samples(size), make_samples(size + 1, version=1)
    expected = train(ALONE, SETUPS[kind], [("accumulate", first), STEP, ("accumulate", second), STEP])
    assert "held" in kind or any(gradient.any() for gradient in expected.gradients.values())
    calls = [*cut(rng, first), STEP, *cut(rng, second), STEP]
    found: list[Trained] = ranks.run(size, train, SETUPS[kind], calls)
    assert all(each.results == found[0].results for each in found), "all ranks say the same"
    assert error(found[0].gradients, expected.gradients) < 1e-6
    assert error(found[0].weights, expected.weights) < 1e-6
    assert not any(each.weights for each in found[1:])
    same_stats(found[0].results[-1], expected.results[-1])


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [*zip(SETUPS, cycle([(1, 2, 4), (4, 1, 2)]), strict=False), *((kind, (2, 2, 2)) for kind in SETUPS)],
    ids=str,
)
def test_a_state_moves_to_other_processes_and_numbers_of_ranks_between_two_micro_batches(
    ranks: Ranks, kind: str, sizes: Sequence[int]
) -> None:
    first, second = make_samples(1), make_samples(2, version=1)
    parts: list[list[Call]] = [
        [("accumulate", first[:3])],
        [("accumulate", first[3:5]), ("accumulate", first[5:]), STEP, ("accumulate", second[:1])],
        [("accumulate", second[1:]), STEP],
    ]
    expected = train(ALONE, SETUPS[kind], [call for part in parts for call in part])
    states: list[RankState] | None = None
    results: list[Any] = []
    for size, calls in zip(sizes, parts, strict=True):
        found: list[Trained] = ranks.run(size, train, SETUPS[kind], calls, states)
        states = [each.state for each in found]
        assert all(state.data == states[0].data for state in states)
        results += found[0].results
    assert error(found[0].weights, expected.weights) < 1e-6
    same_stats(results[-1], expected.results[-1])
    if set(sizes) == {2}:  # the same bits
        unbroken: list[Trained] = ranks.run(2, train, SETUPS[kind], [call for part in parts for call in part])
        assert results == unbroken[0].results
        for state, other in zip(states or [], unbroken, strict=True):
            assert state.data == other.state.data
            assert all(
                np.array_equal(state.tensors[name], other.state.tensors[name]) for name in state.tensors
            )


def test_the_losses_of_two_ranks_are_those_of_one_over_20_steps(ranks: Ranks) -> None:
    setup = SETUPS["dapo"]
    calls: list[Call] = []
    for step in range(20):
        samples = make_samples(step, version=step)
        calls += [("accumulate", samples[:5]), ("accumulate", samples[5:]), STEP]
    alone = train_as_configured(ALONE, setup, calls)
    found: list[Trained] = ranks.run(2, train_as_configured, setup, calls)
    losses = [
        [each.figures["loss"] for each in trained.results if isinstance(each, StepStats)]
        for trained in (alone, found[0])
    ]
    assert len(losses[0]) == 20 and len(set(losses[0])) == 20
    assert np.abs(np.array(losses[0]) - np.array(losses[1])).max() < 1e-5


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_chunks_in_bfloat16_on_ranks_give_the_gradient_of_one_product(ranks: Ranks, tied: bool) -> None:
    setup = gang_setup({"name": "dapo"}, dtype="bfloat16", tie_word_embeddings=tied)
    calls: list[Call] = [("accumulate", make_samples(1)), ("accumulate", make_samples(2)), STEP]
    expected = train_as_configured(ALONE, setup, calls)
    for found in (train_in_chunks(ALONE, setup, calls), ranks.run(2, train_in_chunks, setup, calls)[0]):
        assert error(found.gradients, expected.gradients) < 0.01


def test_bfloat16_on_ranks_is_as_exact_as_on_one_rank_on_float32_master_weights(ranks: Ranks) -> None:
    """Ranks round the weights of the norms in the layers, too: after a step these are not 1 any more."""
    samples, setup = make_samples(1), gang_setup({"name": "dapo"}, dtype="bfloat16")
    calls: list[Call] = [("accumulate", samples), STEP, ("accumulate", make_samples(2, version=1))]
    alone = train_as_configured(ALONE, setup, calls)
    full = train_as_configured(ALONE, SETUPS["dapo"], calls)
    found: list[Trained] = ranks.run(2, train_as_configured, setup, calls)
    rounding = error(alone.gradients, full.gradients)
    assert 1e-3 < rounding < 0.5
    assert error(found[0].gradients, full.gradients) < 1.5 * rounding
    first: list[Trained] = ranks.run(2, train_as_configured, setup, calls[:1])
    assert error(first[0].gradients, train_as_configured(ALONE, setup, calls[:1]).gradients) < rounding / 4
    assert {tensor.dtype for tensor in found[0].state.tensors.values()} == {np.dtype("float32")}
    assert error(found[0].weights, alone.weights) < 0.02


@pytest.mark.parametrize("settings", [{}, {"updates": 2}], ids=["one update", "two updates"])
@pytest.mark.parametrize("sizes", [(1, 11), (11, 1)], ids=["idle first", "idle later"])
def test_a_users_loss_never_sees_the_forward_of_a_rank_that_has_no_sample(
    ranks: Ranks, sizes: Sequence[int], settings: dict[str, Any]
) -> None:
    """There it would divide by 0, and 0 times its gradient is not 0."""
    loss = {"name": "dapo", "loss": LEAVE_ONE_OUT, "loss_columns": ("spread",), "old_policy": "behaviour"}
    setup = gang_setup(loss, **settings)
    samples = [
        replace(sample, columns={"spread": np.full(len(sample.tokens), 0.5 + number, np.float32)})
        for number, sample in enumerate(make_samples(1))
    ]
    first = sizes[0]
    calls: list[Call] = [("accumulate", samples[:first]), ("accumulate", samples[first:]), STEP]
    expected = train(ALONE, setup, calls)
    found: list[Trained] = ranks.run(2, train, setup, calls)
    assert all(gradient.any() for gradient in expected.gradients.values())
    assert error(found[0].gradients, expected.gradients) < 1e-6
    assert error(found[0].weights, expected.weights) < 1e-6
    same_stats(found[0].results[-1], expected.results[-1])


def test_sft_on_ranks_is_that_of_one_rank(ranks: Ranks) -> None:
    examples = [((1, 2, 3), (4,)), ((5,), (6, 7)), ((8, 9), (1, 2, 3, 4))]
    calls: list[Call] = [
        ("sft", examples), ("sft", examples[:1]), ("sft_done", None), ("accumulate", make_samples(1)), STEP,
    ]  # fmt: skip
    expected = train(ALONE, SETUPS["critic"], calls)
    found: list[Trained] = ranks.run(4, train, SETUPS["critic"], calls)
    assert found[0].results[:2] == pytest.approx(expected.results[:2], rel=1e-6)
    assert error(found[0].weights, expected.weights) < 1e-6


# --------------------------------------------------------------------------- files


def make_tokenizer() -> PreTrainedTokenizerFast:
    fast: Any = PreTrainedTokenizerFast  # its constructor has no types
    return fast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))  # type: ignore[no-any-return]


def save(gang: GangRank, kind: str, folder: Path) -> None:
    policy = made_policy(gang, SETUPS[kind], None)
    policy.accumulate(make_samples(1))
    policy.optimizer_step()
    policy.save(folder, make_tokenizer())


def load(gang: GangRank, kind: str, folder: Path) -> tuple[RankState, Any]:
    """The state after loading and a step, and its figures."""
    seed = SEED if kind == "adapter" else 99  # the random base of an adapter comes from the seed
    policy = TorchFactory(seed, 10).build(NAME, SETUPS[kind], gang)
    policy.load(folder)
    policy.accumulate(make_samples(2, version=1))
    stats = policy.optimizer_step()
    return RankState({name: array(tensor) for name, tensor in policy.base_state().items()}, {}, {}), stats


@pytest.mark.parametrize("kind", ["critic", "tied", "adapter"])
def test_a_checkpoint_of_any_ranks_continues_on_any_other(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    for size in (1, 2, 4):
        ranks.run(size, save, kind, tmp_path / str(size))
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    for size in (2, 4):
        assert sorted(path.name for path in (tmp_path / str(size)).iterdir()) == files
        for path in (tmp_path / "1").glob("*.safetensors"):
            assert error(load_file(tmp_path / str(size) / path.name), load_file(path)) < 1e-3
        for path in (tmp_path / "1").glob("*.json"):
            assert json.loads((tmp_path / str(size) / path.name).read_text()) == json.loads(path.read_text())
    expected, stats = ranks.run(1, load, kind, tmp_path / "2")[0]
    for size in (2, 4):
        found = ranks.run(size, load, kind, tmp_path / "2")
        for name, tensor in expected.tensors.items():
            if tensor.ndim:
                rows = np.concatenate([state.tensors[name] for state, _ in found])
                assert np.linalg.norm(rows - tensor) <= 1e-3 * np.linalg.norm(tensor) + 1e-6, name
        same_stats(found[0][1], stats, 1e-3)


def test_weights_start_a_policy_of_any_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save, "critic", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for size in (1, 4):
        found = ranks.run(size, started, tmp_path)[0]
        assert found.keys() == whole.keys()
        assert all(np.array_equal(found[name], whole[name]) for name in whole)


def started(gang: GangRank, folder: Path) -> dict[str, NDArray[Any]]:
    policy = TorchFactory(99, 10).build(NAME, SETUPS["critic"], gang)
    policy.start_from(folder)
    return {name: array(tensor) for name, tensor in published(policy).items()}


# --------------------------------------------------------------------------- refusals


def refused(gang: GangRank, batch: list[Sample]) -> tuple[str, int]:
    """The error of a micro-batch, and the samples of a step after it and another micro-batch."""
    policy = made_policy(gang, SETUPS["dapo"], None)
    problem = ""
    try:
        policy.accumulate(batch)
    except (ValueError, StaleSample) as raised:
        problem = str(raised)
    policy.accumulate(make_samples(3))
    return problem, policy.optimizer_step().samples


@pytest.mark.parametrize(
    "change",
    [
        {"policy_version": 3},
        {"tokens": (1,), "logprobs": ()},
        {"prompt_tokens": (18,)},
        {"prompt_tokens": ()},
    ],
)
def test_all_ranks_refuse_a_sample_that_one_of_them_would_train(ranks: Ranks, change: dict[str, Any]) -> None:
    batch = make_samples(1)
    for position in (0, 5):
        bad = [*batch[:position], replace(batch[position], **change), *batch[position + 1 :]]
        found = ranks.run(2, refused, bad)
        assert found[0] == found[1] and found[0][0]
        assert found[0][1] == len(make_samples(3))


def infinite(gang: GangRank) -> str:
    policy = made_policy(gang, SETUPS["dapo"], None)
    policy.accumulate(make_samples(1))
    if gang.rank == 1:
        next(iter(policy.models.gradients().values()))[0] = float("inf")
    try:
        policy.optimizer_step()
    except NonFiniteGradient as raised:
        return str(raised)
    return ""


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(ranks: Ranks) -> None:
    found = ranks.run(2, infinite)
    assert found[0] == found[1] and "solver" in found[0]


def test_each_rank_has_its_rows_of_every_tensor_and_of_its_moments(ranks: Ranks) -> None:
    whole = train(ALONE, SETUPS["critic"], [("accumulate", make_samples(1))]).state
    found: list[Trained] = ranks.run(4, train, SETUPS["critic"], [("accumulate", make_samples(1))])
    for name, tensor in whole.tensors.items():
        parts = [each.state.tensors[name] for each in found]
        if tensor.ndim:
            assert np.concatenate(parts).shape == tensor.shape
            assert max(part.shape[0] for part in parts) == -(-tensor.shape[0] // 4)


def test_the_same_processes_join_gangs_of_other_members_and_sizes(ranks: Ranks) -> None:
    for size in (3, 1, 4, 2, 2, 4):
        assert ranks.run(size, rank_and_sum) == [(rank, size * (size - 1) / 2) for rank in range(size)]


def rank_and_sum(gang: GangRank) -> tuple[int, float]:
    return gang.rank, float(gang.sum(torch.tensor(float(gang.rank))))


def listening(_gang: GangRank) -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


def test_ranks_listen_to_their_own_host_alone(ranks: Ranks) -> None:
    for addresses in ranks.run(2, listening):
        assert {address for address, _ in addresses} == {"127.0.0.1"}


def left_alone(gang: GangRank) -> tuple[str, int]:
    """The last rank's process ends within a step. Of the others: the error of their next micro-batch, and the samples
    of a step of their own afterwards, without a gang."""
    policy = made_policy(gang, SETUPS["dapo"], None)
    policy.accumulate(make_samples(1))
    if gang.rank == gang.size - 1:
        os._exit(1)
    problem = ""
    try:
        policy.accumulate(make_samples(2))
    except RuntimeError as raised:
        problem = str(raised)
    alone = made_policy(ALONE, SETUPS["dapo"], None)
    alone.accumulate(make_samples(1))
    return problem, alone.optimizer_step().samples


def test_a_rank_that_dies_ends_the_calls_of_the_others_which_join_other_gangs() -> None:
    ranks = Ranks(3)
    *survivors, dead = ranks.run(3, left_alone)
    assert dead is None
    for problem, samples in survivors:
        assert is_cut(problem), problem
        assert samples == len(make_samples(1))
    assert ranks.run(2, rank_and_sum) == [(0, 1.0), (1, 1.0)]
    ranks.close()


def test_a_gang_that_does_not_come_together_names_the_missing_ranks_after_the_deadline() -> None:
    meeting = Meeting(LOOPBACK)
    alone = Membership(1, 3, meeting.address, torch.device("cpu"), 0.3)
    place, _, _ = meeting.address.partition("/")
    with pytest.raises(GangIncomplete, match=rf"have not come to {place} within 0.3 s: 0, 2"):
        alone.join()
    alone.leave()
    meeting.close()
    assert Membership(0, 1, "", torch.device("cpu")).join() is ALONE


def join_alone(_alone: GangRank) -> None:
    """A gang of two does not come together."""
    meeting = Meeting(LOOPBACK)
    with pytest.raises(GangIncomplete):
        Membership(0, 2, meeting.address, torch.device("cpu"), 0.1).join()
    meeting.close()


def test_gangs_train_after_one_that_did_not_come_together() -> None:
    ranks = Ranks(2)
    ranks.run_alone(join_alone, (), ())
    calls: list[Call] = [("accumulate", make_samples(1)), STEP]
    first, second = (ranks.run(2, train_as_configured, SETUPS["dapo"], calls) for _ in range(2))
    assert first[0].results[-1] == second[0].results[-1]
    ranks.close()
