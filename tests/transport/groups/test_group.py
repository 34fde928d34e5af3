"""Groups: planned sends between members, and members that are missing, leave or are killed."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexmarl.transport.errors import CorruptState, MemberMissing
from flexmarl.transport.groups import group as group_module
from flexmarl.transport.groups.group import Group, GroupAddress, PlanRun
from flexmarl.transport.groups.plan import Plan, Step, make_plan, whole
from flexmarl.transport.handle import TensorSpec

from ...patience import PATIENCE_S

torch.set_num_threads(1)
NEVER = threading.Event()
SPECS = (
    TensorSpec("a", (10, 3), "float32", 0),
    TensorSpec("b", (7,), "bfloat16", 128),
    TensorSpec("scalar", (), "int64", 192),
)
STATE = {
    "a": torch.arange(30.0).view(10, 3),
    "b": torch.arange(7.0).to(torch.bfloat16),
    "scalar": torch.tensor(42),
}
NAMED = {spec.name: spec for spec in SPECS}
Part = Callable[[Group], Any]


def together(directory: Path, parts: Mapping[str, Part], name: str = "g") -> dict[str, Any]:
    """Runs each member's part in a thread; returns the results or errors."""
    address = GroupAddress(name, tuple(parts))

    def one(member: str) -> Any:
        group = Group(address, member, directory)
        try:
            group.connect(NEVER, PATIENCE_S)
            return parts[member](group)
        except (MemberMissing, CorruptState) as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(len(parts)) as pool:
        return dict(zip(parts, pool.map(one, parts), strict=True))


def rows(
    tensors: Mapping[str, Tensor], chosen: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, Tensor]]:
    return {
        name: (start, tensors[name][start:stop].clone() if tensors[name].ndim else tensors[name].clone())
        for name, (start, stop) in chosen.items()
    }


def run(
    group: Group, plan: Plan, held: Any, into: Any, reached: Callable[[Step], None] = lambda step: None
) -> None:
    group.run(PlanRun(1, "key", 1, plan, NAMED), held, into, NEVER, PATIENCE_S, reached)


@pytest.mark.parametrize("step_bytes", [10, 50, 1 << 20])
def test_shards_of_trainers_become_whole_tensors_and_other_shards(tmp_path: Path, step_bytes: int) -> None:
    held = {
        "t0": {"a": (0, 4), "b": (0, 4), "scalar": (0, 1)},
        "t1": {"a": (4, 8), "b": (4, 7)},
        "t2": {"a": (8, 10)},
    }
    wanted: dict[str, dict[str, tuple[int, int]]] = {
        "e0": {name: (start, stop) for name, (start, stop) in whole(SPECS).items()},
        "e1": {"a": (3, 9), "b": (0, 2)},
        "t1": {"a": (2, 6)},
    }
    plan = make_plan("key", SPECS, held, wanted, step_bytes)

    def part(member: str) -> Part:
        def act(group: Group) -> dict[str, tuple[int, Tensor]]:
            into = rows(
                {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}, wanted.get(member, {})
            )
            run(group, plan, rows(STATE, held.get(member, {})), into)
            run(group, plan, rows(STATE, held.get(member, {})), into)  # again, by the same connections
            return into

        return act

    results = together(tmp_path, {member: part(member) for member in ("t0", "t1", "t2", "e0", "e1")})
    for member, chosen in wanted.items():
        for name, (first, tensor) in rows(STATE, chosen).items():
            got_first, got = results[member][name]
            assert got_first == first and torch.equal(got, tensor), (member, name)


def test_members_that_do_not_join_are_named(tmp_path: Path) -> None:
    address = GroupAddress("g", ("t", "e0", "e1"))
    group = Group(address, "t", tmp_path)
    with pytest.raises(MemberMissing, match="group g: e0, e1 missing within 0.05 s") as raised:
        group.connect(NEVER, 0.05)
    assert raised.value.missing == ["e0", "e1"]


def test_a_member_that_leaves_is_named_with_the_step(tmp_path: Path) -> None:
    plan = make_plan("key", SPECS, {"t": whole(SPECS)}, {"e": whole(SPECS)}, 24)
    assert len(plan.steps) > 4

    def leave(step: Step) -> None:
        if step.number == 3:
            raise MemberMissing("g", [], "leaving", 0)

    into = rows({name: torch.zeros_like(tensor) for name, tensor in STATE.items()}, whole(SPECS))
    results = together(
        tmp_path,
        {
            "t": lambda group: run(group, plan, rows(STATE, whole(SPECS)), {}, leave),
            "e": lambda group: run(group, plan, {}, into),
        },
    )
    assert isinstance(results["e"], MemberMissing)
    assert results["e"].missing == ["t"]
    assert f"step 3 of {len(plan.steps)}" in str(results["e"])


def test_changed_bytes_are_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = group_module._digest
    calls = []

    def first_is_wrong(flat: Tensor) -> Tensor:
        calls.append(flat)
        return digest(flat) ^ (len(calls) == 1)

    monkeypatch.setattr(group_module, "_digest", first_is_wrong)
    plan = make_plan("key", SPECS, {"t": whole(SPECS)}, {"e": whole(SPECS)})
    into = rows({name: torch.zeros_like(tensor) for name, tensor in STATE.items()}, whole(SPECS))
    results = together(
        tmp_path,
        {
            "t": lambda group: run(group, plan, rows(STATE, whole(SPECS)), {}),
            "e": lambda group: run(group, plan, {}, into),
        },
    )
    assert isinstance(results["e"], CorruptState)
    assert not any(tensor.any() for _, tensor in into.values()), "of this step nothing was written"


MEMBER = """
import os, pathlib, signal, sys, threading
import torch
from flexmarl.transport.handle import TensorSpec
from flexmarl.transport.groups.group import Group, GroupAddress, PlanRun
from flexmarl.transport.groups.plan import make_plan, whole

torch.set_num_threads(1)
member, number = sys.argv[2], int(sys.argv[3])
specs = (TensorSpec("a", (8, 1000), "float32", 0),)
tensors = {"a": (0, torch.ones(8, 1000))}
plan = make_plan("key", specs, {"t": whole(specs)}, {"e": whole(specs)}, 4000)

def reached(step):
    if step.number == number:
        os.kill(os.getpid(), signal.SIGKILL)

group = Group(GroupAddress("g", ("t", "e")), member, pathlib.Path(sys.argv[1]))
group.connect(threading.Event(), 60)
held, into = (tensors, {}) if member == "t" else ({}, tensors)
group.run(PlanRun(1, "key", 1, plan, {"a": specs[0]}), held, into, threading.Event(), 60, reached)
"""


@pytest.mark.parametrize("killed", ["t", "e"])
@pytest.mark.parametrize("number", [0, 5])
def test_a_killed_member_is_named(tmp_path: Path, killed: str, number: int) -> None:
    specs = (TensorSpec("a", (8, 1000), "float32", 0),)
    plan = make_plan("key", specs, {"t": whole(specs)}, {"e": whole(specs)}, 4000)
    assert len(plan.steps) == 8
    transfer = PlanRun(1, "key", 1, plan, {"a": specs[0]})
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER, tmp_path, killed, str(number)],
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    try:
        survivor = "e" if killed == "t" else "t"
        group = Group(GroupAddress("g", ("t", "e")), survivor, tmp_path)
        group.connect(NEVER, PATIENCE_S)
        tensors = {"a": (0, torch.zeros(8, 1000))}
        held, into = ({}, tensors) if killed == "t" else (tensors, {})
        with pytest.raises(MemberMissing) as raised:
            # A sender may be a step or more ahead of its receiver: it needs an answer of the last one.
            for _ in range(3):
                group.run(transfer, held, into, NEVER, PATIENCE_S)
        assert raised.value.missing == [killed] and "step" in raised.value.step
        with pytest.raises(MemberMissing):
            group.connect(NEVER, 1)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        group.close()
    finally:
        process.kill()
        process.wait()


def test_addresses_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="invalid group name"):
        GroupAddress("../g", ("a", "b"))
    with pytest.raises(ValueError, match="two different members"):
        GroupAddress("g", ("a", "a"))
    with pytest.raises(ValueError, match=r"group g has no member c \(a, b\)"):
        Group(GroupAddress("g", ("a", "b")), "c", tmp_path)
