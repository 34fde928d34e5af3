"""Ranks in replicas, each of which has all tensors, compute what one rank computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import distributed

from flexmarl.actors.messages import Sample
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank
from flexmarl.actors.trainer.shards import Shard
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .gang_cases import SETUPS, error, same_stats
from .policies import make_samples
from .ranks import (
    STEP,
    Call,
    Ranks,
    RankState,
    Trained,
    gang_setup,
    made_policy,
    train,
    train_as_configured,
)
from .test_gang_rank import load, save

KINDS = ("dapo", "critic", "held", "updates", "tied", "deep", "recomputed", "adapter")
FIRST, SECOND = make_samples(1), make_samples(2, version=1)
PARTS: list[list[Call]] = [
    [("accumulate", FIRST[:3])],
    [("accumulate", FIRST[3:5]), ("accumulate", FIRST[5:]), STEP, ("accumulate", SECOND[:1])],
    [("accumulate", SECOND[1:]), STEP],
]
CALLS = [call for part in PARTS for call in part]


def assert_same_bits(states: Sequence[RankState], others: Sequence[RankState]) -> None:
    for state, other in zip(states, others, strict=True):
        assert state.data == other.data and state.parts == other.parts
        assert state.tensors.keys() == other.tensors.keys()
        for name, tensor in state.tensors.items():
            assert np.array_equal(tensor, other.tensors[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_of_two_ranks_compute_what_one_rank_and_four_do(ranks: Ranks, kind: str) -> None:
    expected = train(ALONE, SETUPS[kind], CALLS)
    divided: list[Trained] = ranks.run(4, train, SETUPS[kind], CALLS)
    found: list[Trained] = ranks.run(4, train, SETUPS[kind], CALLS, replicas=2)
    assert all(each.results == found[0].results for each in found)
    for other in (expected, divided[0]):
        assert error(found[0].gradients, other.gradients) < 1e-6
        assert error(found[0].weights, other.weights) < 1e-6
        same_stats(found[0].results[-1], other.results[-1])
    assert not any(each.weights for each in found[1:]), "the first rank publishes"
    states = [each.state for each in found]
    assert_same_bits(states[2:], states[:2])


def test_replicas_of_one_rank_compute_what_one_rank_does(ranks: Ranks) -> None:
    expected = train(ALONE, SETUPS["critic"], CALLS)
    found: list[Trained] = ranks.run(2, train, SETUPS["critic"], CALLS, replicas=2)
    assert error(found[0].weights, expected.weights) < 1e-6
    assert all(part.is_whole for part in found[0].state.parts.values())
    assert_same_bits([found[1].state], [found[0].state])


@pytest.mark.parametrize("kind", ["critic", "adapter"])
@pytest.mark.parametrize(
    "gangs",
    [((4, 2), (2, 1), (4, 1)), ((1, 1), (4, 2), (1, 1)), ((2, 2), (4, 1), (4, 2)), ((4, 2),) * 3],
    ids=str,
)
def test_a_state_moves_between_numbers_of_ranks_and_of_replicas(
    ranks: Ranks, kind: str, gangs: Sequence[tuple[int, int]]
) -> None:
    states: list[RankState] | None = None
    results: list[Any] = []
    for (size, replicas), calls in zip(gangs, PARTS, strict=True):
        found: list[Trained] = ranks.run(size, train, SETUPS[kind], calls, states, replicas=replicas)
        states = [each.state for each in found][: size // replicas]  # those of the first replica
        results += found[0].results
    expected = train(ALONE, SETUPS[kind], CALLS)
    assert error(found[0].weights, expected.weights) < 1e-6
    same_stats(results[-1], expected.results[-1])
    if set(gangs) == {(4, 2)}:  # the same bits
        unbroken: list[Trained] = ranks.run(4, train, SETUPS[kind], CALLS, replicas=2)
        assert_same_bits([each.state for each in found], [each.state for each in unbroken])


def test_bfloat16_in_replicas_is_as_exact_as_without(ranks: Ranks) -> None:
    setup = gang_setup({"name": "dapo"}, dtype="bfloat16", num_hidden_layers=2)
    calls: list[Call] = [("accumulate", FIRST), ("accumulate", make_samples(2)), STEP]
    whole: list[Trained] = ranks.run(2, train_as_configured, setup, calls)
    found: list[Trained] = ranks.run(4, train_as_configured, setup, calls, replicas=2)
    assert error(found[0].gradients, whole[0].gradients) < 0.01
    assert_same_bits([each.state for each in found[2:]], [each.state for each in found[:2]])


@pytest.mark.parametrize("kind", ["critic", "adapter"])
def test_a_checkpoint_of_replicas_is_that_of_their_first_and_continues_anywhere(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    for size, replicas in ((1, 1), (4, 2)):
        ranks.run(size, save, kind, tmp_path / str(size), replicas=replicas)
    names = [sorted(path.name for path in (tmp_path / str(size)).iterdir()) for size in (1, 4)]
    assert names[0] == names[1]
    for path in (tmp_path / "1").glob("*.safetensors"):
        assert error(load_file(tmp_path / "4" / path.name), load_file(path)) < 1e-3
    expected, stats = ranks.run(1, load, kind, tmp_path / "4")[0]
    for size, replicas in ((4, 2), (2, 1)):
        found = ranks.run(size, load, kind, tmp_path / "4", replicas=replicas)
        for name, tensor in expected.tensors.items():
            if tensor.ndim:
                rows = np.concatenate([state.tensors[name] for state, _ in found[:2]])
                assert np.linalg.norm(rows - tensor) <= 1e-3 * np.linalg.norm(tensor) + 1e-6, name
        same_stats(found[0][1], stats, 1e-3)


def parts_of(gang: GangRank) -> dict[str, Shard]:
    return made_policy(gang, SETUPS["deep"], None).parts()


def test_a_replica_divides_all_tensors_over_its_ranks(ranks: Ranks) -> None:
    pairs: list[dict[str, Shard]] = ranks.run(2, parts_of)
    assert ranks.run(4, parts_of, replicas=2) == [*pairs, *pairs]


MANY = [make_samples(seed, groups=9) for seed in (1, 2)]


def with_small_forwards(setup: PolicySetup) -> PolicySetup:
    trainer = setup.torch_trainer.model_copy(update={"tokens_per_forward": 8})
    return setup.model_copy(update={"trainer": trainer})


@dataclass(frozen=True, slots=True)
class Crossing:
    """A micro-batch of a rank: its forwards, and the bytes of each all-reduce between replicas, of gradients and of
    figures, which are one tensor of all ranks."""

    forwards: int
    gradients: list[int]
    figures: list[int]


def crossings(
    gang: GangRank, setup: PolicySetup, batches: Sequence[Sequence[Sample]]
) -> tuple[list[Crossing], list[int]]:
    """With the bytes of this rank's part of each gradient."""
    policy = made_policy(gang, setup, None)
    found = []
    all_reduce, replica = distributed.all_reduce, gang.rank // gang.replica_size
    own_replica = set(range(replica * gang.replica_size, (replica + 1) * gang.replica_size))
    for batch in batches:
        crossing = Crossing(len(policy._gradients.chunks(policy._check_samples(batch))), [], [])

        def note(
            values: torch.Tensor, *, crossing: Crossing = crossing, group: Any = None, **options: Any
        ) -> Any:
            if group is None:
                crossing.figures.append(values.nbytes)
            elif not own_replica.issuperset(distributed.get_process_group_ranks(group)):
                crossing.gradients.append(values.nbytes)
            return all_reduce(values, group=group, **options)

        with mock.patch.object(distributed, "all_reduce", note):
            policy.accumulate(batch)
        found.append(crossing)
    return found, sorted(part.nbytes for part in policy.models.gradients().values() if part.numel())


@pytest.mark.parametrize("kind", ["dapo", "recomputed", "adapter"])
def test_gradients_cross_replicas_once_in_a_micro_batch(ranks: Ranks, kind: str) -> None:
    setup = with_small_forwards(SETUPS[kind])
    for found, own in ranks.run(4, crossings, setup, [MANY[0][:4], MANY[0]], replicas=2):
        few, many = (crossing.forwards for crossing in found)
        assert few <= 2 and many >= 4
        for crossing in found:
            assert sorted(crossing.gradients) == own, "each part once"
            assert sum(crossing.figures) < 1024


@pytest.mark.parametrize("kind", ["dapo", "critic", "adapter"])
def test_many_forwards_in_replicas_are_exact(ranks: Ranks, kind: str) -> None:
    setup = with_small_forwards(SETUPS[kind])
    calls: list[Call] = [("accumulate", MANY[0]), ("accumulate", MANY[1]), STEP]
    expected = train(ALONE, setup, calls)
    found: list[Trained] = ranks.run(4, train, setup, calls, replicas=2)
    assert error(found[0].gradients, expected.gradients) < 1e-6
    assert error(found[0].weights, expected.weights) < 1e-6
    states = [each.state for each in found]
    assert_same_bits(states[2:], states[:2])
