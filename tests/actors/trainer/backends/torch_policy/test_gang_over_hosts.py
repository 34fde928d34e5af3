"""Gangs whose ranks are on two hosts, which are network namespaces: they compute what the ranks of one host do."""

from collections.abc import Iterator

import numpy as np
import pytest

from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE
from flexmarl.launch.bench.namespaces import Host, missing, two_hosts
from scripts.bench.replicas import Options, Traffic, measure_rank

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
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as (near, far):
        yield near, far


@pytest.fixture(scope="module")
def apart(hosts: tuple[Host, Host]) -> Iterator[Ranks]:
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


@pytest.fixture(scope="module")
def pairs(hosts: tuple[Host, Host]) -> Iterator[Ranks]:
    """The first two ranks are on one host, the other two on another."""
    near, far = hosts
    ranks = Ranks(4, (near, near, far, far))
    yield ranks
    ranks.close()


def test_a_replica_on_each_host_computes_what_one_rank_and_four_do(pairs: Ranks) -> None:
    found: list[Trained] = pairs.run(4, train, SETUP, CALLS, replicas=2)
    divided: list[Trained] = pairs.run(4, train, SETUP, CALLS)
    for other in (train(ALONE, SETUP, CALLS), divided[0]):
        assert error(found[0].gradients, other.gradients) < 1e-6
        assert error(found[0].weights, other.weights) < 1e-6


def test_a_state_of_replicas_on_two_hosts_moves_to_one_host_and_back(pairs: Ranks) -> None:
    states = None
    for (size, replicas), calls in zip(((4, 2), (2, 1), (4, 2)), PARTS, strict=True):
        found: list[Trained] = pairs.run(size, train, SETUP, calls, states, replicas=replicas)
        states = [each.state for each in found[:2]]
    assert error(found[0].weights, train(ALONE, SETUP, CALLS).weights) < 1e-6


@pytest.mark.skipif(missing() is not None, reason="bytes are counted on network namespaces")
def test_gradients_of_replicas_cross_hosts_once_in_a_micro_batch(pairs: Ranks) -> None:
    options = Options(rounds=1, forwards=(1, 3), layers=2, hidden=64)
    found: list[Traffic] = pairs.run(4, measure_rank, options, replicas=2)
    divided: Traffic = pairs.run(4, measure_rank, options)[0]
    once = 4 * divided.parameters  # both passes of a ring over two replicas, float32
    for traffic in found:
        # Frames have headers, and each micro-batch a few sums of figures: more beside so small a model.
        assert all(once < size < 1.2 * once for size in traffic.received_bytes.values())
    assert divided.received_bytes[3] > 2.5 * divided.received_bytes[1] > 2.5 * once
