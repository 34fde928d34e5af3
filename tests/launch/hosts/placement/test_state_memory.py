"""The memory of each host for the states of a shared pool, in bytes computed by hand."""

from dataclasses import replace

import pytest

from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.hosts.placement.plan import Need, Placed, Plan
from flexmarl.launch.hosts.placement.state_memory import (
    GangState,
    bytes_by_host,
    state_memory_problems,
    with_state_memory,
)
from flexmarl.launch.hosts.placement.training_bytes import HostStateBytes

from .hosts import GIB, host, shape

SMALL = GangState(HostStateBytes(published=4, rest=12, step=4), ranks=1)
LARGE = GangState(HostStateBytes(published=8, rest=24, step=8), ranks=2)


def test_on_one_host_a_pool_has_each_state_once_and_the_newer_rest_of_the_largest() -> None:
    assert bytes_by_host([SMALL, LARGE], {"head": 4}, "head", are_suspended=True) == {"head": 12 + 48 + 24}
    assert bytes_by_host([SMALL, LARGE], {"head": 4}, "head", are_suspended=False) == {"head": 12 + 36 + 24}
    assert bytes_by_host([], {"head": 4}, "head", are_suspended=True) == {"head": 0}


def test_on_several_hosts_states_are_divided_as_the_slots_and_weights_are_on_the_head() -> None:
    """48 bytes of states, a quarter for each slot. The large policy has two ranks on ``a``, or one elsewhere."""
    needed = bytes_by_host([SMALL, LARGE], {"head": 1, "a": 2, "b": 1}, "head", are_suspended=True)
    assert needed == {"head": 12 + 12 + 12, "a": 24 + 24, "b": 12 + 12}


def test_a_head_without_slots_has_the_weights_alone() -> None:
    assert bytes_by_host([LARGE], {"a": 2}, "head", are_suspended=True) == {"head": 8, "a": 32 + 24}


def test_beyond_the_limit_states_go_to_the_disk_and_the_weights_stay() -> None:
    """Without it 12 bytes of weights and 72 of states."""
    needed = bytes_by_host([SMALL, LARGE], {"head": 4}, "head", are_suspended=True, limit_bytes=10.5)
    assert needed == {"head": 12 + 10}


@pytest.mark.parametrize(("path", "versions"), [("auto", 2), ("shm", 2), ("cuda_ipc", 0)])
def test_a_static_pool_has_two_versions_of_the_weights(path: str, versions: int) -> None:
    on_gpus = ["agent_defaults.model.device=cuda", "agent_defaults.model.dtype=float32"]
    config = resolve("sort-digits", ["pool={name: static}", f"weights.path={path}", *on_gpus])
    trainer = Need("trainer", "pool.name=static", on_head=True)
    plan = Plan(
        {"trainer": Placed("head", trainer), "store": Placed("head", replace(trainer, actor="store"))}
    )
    shapes = dict.fromkeys(config.policies, shape(1000))
    actors = with_state_memory(plan, config, shapes, None).actors
    assert actors["trainer"].need.shared_bytes == versions * 4 * 1000 * len(config.trained)
    assert actors["store"].need.shared_bytes == 0


def test_a_host_with_too_little_memory_is_refused_with_the_numbers() -> None:
    need = Need("slot-0", "pool.slots=1", shared_bytes=3 * GIB)
    plan = Plan({"slot-0": Placed("b", need), "slot-1": Placed("a", replace(need, shared_bytes=GIB))})
    (problem,) = state_memory_problems(plan, [host("a"), host("b")])
    assert problem.startswith(
        "3.0 GiB of /dev/shm on b are needed for published weights and suspended states"
    )
    assert "and 1.0 GiB are free; " in problem and "pool.host_memory_gib" in problem
