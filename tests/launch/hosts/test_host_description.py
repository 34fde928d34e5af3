"""Hosts as the placement sees them: limits, visible GPUs, the processes of others, versions."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import psutil
import pytest

from flexmarl.core.protocol.codec import Encoder
from flexmarl.core.signature import signature_of
from flexmarl.launch.hosts import host_description
from flexmarl.launch.hosts.cgroup import CgroupLimits
from flexmarl.launch.hosts.host_description import (
    GpuUser,
    HostDescription,
    describe_host,
    version_problems,
    visible_devices,
)
from flexmarl.launch.hosts.nvidia import NvidiaDevice

from ..fake_nvml import FakeGpu, devices_of

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def other_process() -> Iterator[int]:
    """A process that this one has not started: its parent has ended."""
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    code = f"import subprocess; print(subprocess.Popen(['sleep', '300'], {quiet}).pid)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid = int(made.stdout)
    yield pid
    psutil.Process(pid).kill()


def device(uuid: str, index: int) -> NvidiaDevice:
    return NvidiaDevice(uuid, "H100", 80, 80, None, (), index, (), 0)


def test_a_host_without_gpus_is_described() -> None:
    found = describe_host("node-7", devices_of())
    assert found.name == "node-7" and found.gpus == ()
    assert found.gpus_note == "the driver refuses: Driver Not Loaded"
    assert 1 <= found.cores <= len(os.sched_getaffinity(0))
    assert 1 << 20 < found.memory_bytes <= psutil.virtual_memory().total
    assert 0 < found.shared_memory_free_bytes <= found.shared_memory_bytes
    assert found.python == sys.version.split()[0] and found.packages["torch"]


def test_the_limits_of_the_control_group_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_description, "cgroup_limits", lambda: CgroupLimits(1.9, 12345))
    found = describe_host("", devices_of())
    assert (found.cores, found.memory_bytes) == (1, 12345)
    monkeypatch.setattr(host_description, "cgroup_limits", lambda: CgroupLimits(0.5, None))
    assert describe_host("", devices_of()).cores == 1
    monkeypatch.setattr(host_description, "cgroup_limits", lambda: CgroupLimits(10000.0, 1 << 60))
    found = describe_host("", devices_of())
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_bytes == psutil.virtual_memory().total


def test_the_processes_of_others_are_named_and_our_own_are_not(other_process: int) -> None:
    own = subprocess.Popen(["sleep", "300"])
    try:
        processes = ((os.getpid(), 2 * GIB), (own.pid, 3 * GIB), (other_process, 5 * GIB), (2**22 + 1, GIB))
        (gpu,) = describe_host("a", devices_of(FakeGpu("GPU-1", free=69 * GIB, processes=processes))).gpus
    finally:
        own.kill()
        own.wait()
    user = psutil.Process().username()
    assert gpu.users == (
        GpuUser(other_process, user, "sleep", 5 * GIB),
        GpuUser(2**22 + 1, "", "", GIB),
    )
    assert [str(found) for found in gpu.users] == [
        f"process {other_process} sleep of {user}, 5.0 GiB",
        f"process {2**22 + 1} of an unknown user, 1.0 GiB",
    ]


def test_memory_that_an_unseen_process_uses_has_a_user() -> None:
    idle, used = FakeGpu("GPU-1", free=79 * GIB), FakeGpu("GPU-2", free=70 * GIB)
    first, second = describe_host("a", devices_of(idle, used)).gpus
    assert first.users == () and second.users == (GpuUser(None, "", "", 10 * GIB),)
    assert str(second.users[0]) == ("a process that is not seen from here (another container?), 10.0 GiB")


def test_the_environment_s_devices_are_the_only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = describe_host("a", devices_of(FakeGpu("GPU-1"), FakeGpu("GPU-2")))
    assert [(gpu.uuid, gpu.index) for gpu in found.gpus] == [("GPU-2", 1)]
    assert found.gpus_note == "CUDA_VISIBLE_DEVICES='1' shows 1 of the 2 GPUs"


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        (None, ["GPU-ab1", "GPU-cd2", "MIG-ef3", "MIG-ef4"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,0", ["GPU-cd2", "GPU-ab1"]),
        ("GPU-cd, MIG-ef4", ["GPU-cd2", "MIG-ef4"]),
        ("2", ["MIG-ef3"]),
        ("0,7,1", ["GPU-ab1"]),
        ("0,0,1", ["GPU-ab1"]),
    ],
)
def test_names_of_devices_mean_what_they_mean_to_cuda(variable: str | None, shown: list[str]) -> None:
    names = [("GPU-ab1", 0), ("GPU-cd2", 1), ("MIG-ef3", 2), ("MIG-ef4", 2)]
    devices = [device(*name) for name in names]
    found, note = visible_devices(devices, variable)
    assert [one.uuid for one in found] == shown
    assert bool(note) == (variable is not None)


def test_a_description_travels_as_a_message() -> None:
    user = GpuUser(7, "ada", "python", None)
    found = describe_host("a", devices_of(FakeGpu("GPU-1")))
    found = replace(found, gpus=(replace(found.gpus[0], users=(user,)),))

    class Receiver:
        async def joined(self, host: HostDescription) -> None: ...

    signature = signature_of(Receiver, "joined")
    assert signature is not None
    sent = msgpack.unpackb(Encoder().pack({"host": found}), strict_map_key=False)
    assert signature.arguments([], sent, None) == ((), {"host": found})


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    one = describe_host("a", devices_of())
    assert list(version_problems([one, replace(one, name="b", python=one.python + "1")])) == []
    other = replace(one, name="b", python="3.99.0", packages={**one.packages, "torch": None})
    python, torch = version_problems([one, other])
    assert (
        python
        == f"Python must have one version on all hosts: {one.python.rpartition('.')[0]} on a, 3.99 on b"
    )
    expected = f"torch must have one version on all hosts: {one.packages['torch']} on a, not installed on b"
    assert torch == expected


def test_this_host_is_described_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXMARL_RUNTIME_BASE", str(tmp_path))
    assert describe_host().shared_memory == str(tmp_path)
    assert describe_host().name
