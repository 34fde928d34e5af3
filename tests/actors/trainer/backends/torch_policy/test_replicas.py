"""Ranks in replicas, each of which has all tensors, compute what one rank computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank
from flexmarl.actors.trainer.shards import Shard

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
