"""Gangs whose ranks are on two hosts, which are network namespaces: they compute what the ranks of one host do."""

from collections.abc import Iterator

import numpy as np
import pytest

from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE
from flexmarl.launch.bench.namespaces import two_hosts

from .gang_cases import SETUPS, error
from .policies import make_samples
from .ranks import STEP, Call, Ranks, Trained, train

SETUP = SETUPS["dapo"]
FIRST, SECOND = make_samples(1), make_samples(2, version=1)
PARTS: list[list[Call]] = [
    [("accumulate", FIRST[:3])],
    [("accumulate", FIRST[3:5]), ("accumulate", FIRST[5:]), STEP, ("accumulate", SECOND[:1])],
    [("accumulate", SECOND[1:]), STEP],
]
CALLS = [call for part in PARTS for call in part]


@pytest.fixture(scope="module")
def apart() -> Iterator[Ranks]:
    with two_hosts() as hosts:
        ranks = Ranks(4, hosts)
        yield ranks
        ranks.close()


@pytest.fixture(scope="module")
def together() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_two_hosts_compute_what_one_rank_does(apart: Ranks, size: int) -> None:
    expected = train(ALONE, SETUP, CALLS)
    found: list[Trained] = apart.run(size, train, SETUP, CALLS)
    assert error(found[0].gradients, expected.gradients) < 1e-6
    assert error(found[0].weights, expected.weights) < 1e-6


@pytest.mark.parametrize("sizes", [(1, 2, 4), (4, 1, 2)], ids=str)
def test_a_state_moves_to_other_numbers_of_ranks_on_two_hosts(
    apart: Ranks, sizes: tuple[int, int, int]
) -> None:
    states = None
    for size, calls in zip(sizes, PARTS, strict=True):
        found: list[Trained] = apart.run(size, train, SETUP, calls, states)
        states = [each.state for each in found]
    assert error(found[0].weights, train(ALONE, SETUP, CALLS).weights) < 1e-6


def test_two_ranks_on_two_hosts_suspended_in_mid_step_have_the_bits_of_two_on_one(
    apart: Ranks, together: Ranks
) -> None:
    unbroken: list[Trained] = together.run(2, train, SETUP, CALLS)
    states = None
    for ranks, calls in zip((apart, together, apart), PARTS, strict=True):
        found: list[Trained] = ranks.run(2, train, SETUP, calls, states)
        states = [each.state for each in found]
    for each, other in zip(found, unbroken, strict=True):
        assert each.state.data == other.state.data
        assert each.state.tensors.keys() == other.state.tensors.keys()
        for name, tensor in each.state.tensors.items():
            assert np.array_equal(tensor, other.state.tensors[name]), name
