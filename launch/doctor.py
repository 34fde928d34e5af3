"""``flexmarl doctor``: what this machine has for a run, and what a run would stumble over."""

import importlib.metadata
import json
import resource
from dataclasses import asdict, dataclass
from typing import Any, Final

import click
import psutil
from rich.console import Console
from rich.table import Table

from ..transport.block import free_bytes
from ..transport.devices.nvidia import NvidiaDevices, read_devices
from . import env

_LEAST_SHARED_MEMORY: Final = 1 << 30
_PACKAGES: Final = ("torch", "transformers", "vllm", "nvidia-ml-py")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``shared_memory_bytes``: free in the folder for the directories of runs. ``locked_bytes``: the most memory that a
    process may pin; None without a limit. ``problems``: each a sentence."""

    machine: dict[str, Any]
    packages: dict[str, str | None]
    memory_bytes: int
    shared_memory: str
    shared_memory_bytes: int
    locked_bytes: int | None
    nvidia: NvidiaDevices
    problems: tuple[str, ...]


def diagnose() -> Diagnosis:
    """Looks, and changes nothing."""
    base = env.runtime_base()
    free = free_bytes(base)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = None if limit == resource.RLIM_INFINITY else limit
    nvidia = read_devices()
    problems = []
    if free < _LEAST_SHARED_MEMORY:
        problems.append(
            f"{base} has {free >> 20} MiB free: weights are kept there twice; name a larger folder in "
            "FLEXMARL_RUNTIME_BASE"
        )
    if nvidia.devices and locked is not None and locked < _LEAST_SHARED_MEMORY:
        problems.append(
            f"a process may pin {locked >> 20} MiB: raise `ulimit -l` for fast copies to the devices"
        )
    return Diagnosis(
        machine=dict(env.describe_machine()),
        packages={name: _version(name) for name in _PACKAGES},
        memory_bytes=psutil.virtual_memory().total,
        shared_memory=str(base),
        shared_memory_bytes=free,
        locked_bytes=locked,
        nvidia=nvidia,
        problems=tuple(problems),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def doctor(as_json: bool) -> int:
    """Show what this machine has for a run: memory, packages, devices; and what a run would stumble over.

    \b
    Examples:
      flexmarl doctor
      flexmarl doctor --json
    """
    found = diagnose()
    if as_json:
        click.echo(json.dumps(asdict(found)))
    else:
        _show(Console(), found)
    return 1 if found.problems else 0


def _show(console: Console, found: Diagnosis) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("python", f"{found.machine['python']}, {found.machine['platform']}")
    table.add_row("CPUs", str(found.machine["cpus"]))
    table.add_row("memory", f"{found.memory_bytes / 2**30:.1f} GiB")
    table.add_row(
        "shared memory", f"{found.shared_memory_bytes / 2**30:.1f} GiB free in {found.shared_memory}"
    )
    locked = "no limit" if found.locked_bytes is None else f"{found.locked_bytes >> 20} MiB"
    table.add_row("memory to pin", locked)
    for name, version in found.packages.items():
        table.add_row(name, version or "not installed")
    for device in found.nvidia.devices:
        free, total = device.free_bytes / 2**30, device.total_bytes / 2**30
        used = "" if device.utilisation_percent is None else f", {device.utilisation_percent} % busy"
        peers = f", reads {', '.join(device.peers)}" if device.peers else ""
        table.add_row(device.uuid, f"{device.name}: {free:.1f} of {total:.1f} GiB free{used}{peers}")
    if found.nvidia.reason:
        table.add_row("NVIDIA devices", f"none: {found.nvidia.reason}")
    console.print(table)
    for problem in found.problems:
        console.print(problem, style="yellow", markup=False)
