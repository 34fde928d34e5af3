"""``flexmarl doctor``: what this machine has for a run, and what a run would stumble over."""

import json
import resource
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from ..transport.devices.nvidia import NvidiaDevices, read_devices
from .folder_description import FolderDescription, describe_folder
from .host_description import HostDescription, describe_host, version

_LEAST_SHARED_MEMORY: Final = 1 << 30
_LEAST_OPEN_FILES: Final = 1024


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``host``: as the placement of actors sees it. ``locked_bytes``: the most memory that a process may pin;
    ``open_files``: the most files and sockets that it may have open; None without a limit. ``runs``: the
    folder of all runs. ``problems``: each a sentence."""

    host: HostDescription
    platform: str
    nvidia_package: str | None
    locked_bytes: int | None
    open_files: int | None
    nvidia: NvidiaDevices
    runs: FolderDescription
    problems: tuple[str, ...]


def diagnose(runs: Path = Path("runs")) -> Diagnosis:
    """Looks, and leaves everything as it was. ``runs``: the folder of all runs."""
    nvidia = read_devices()
    host = describe_host("", nvidia)
    locked, files = _limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE)
    folder = describe_folder(runs)
    return Diagnosis(
        host=host,
        platform=sysconfig.get_platform(),
        nvidia_package=version("nvidia-ml-py"),
        locked_bytes=locked,
        open_files=files,
        nvidia=nvidia,
        runs=folder,
        problems=(*_problems(host, locked, files), *folder.problems()),
    )


def _problems(host: HostDescription, locked: int | None, files: int | None) -> Iterator[str]:
    if host.shared_memory_free_bytes < _LEAST_SHARED_MEMORY:
        yield (
            f"{host.shared_memory} has {host.shared_memory_free_bytes >> 20} MiB free: weights are kept there twice; "
            "name a larger folder in FLEXMARL_RUNTIME_BASE"
        )
    if host.gpus and locked is not None and locked < _LEAST_SHARED_MEMORY:
        yield f"a process may pin {locked >> 20} MiB: raise `ulimit -l` for fast copies to the devices"
    if files is not None and files < _LEAST_OPEN_FILES:
        yield f"a process may have {files} files open: raise `ulimit -n` to {_LEAST_OPEN_FILES} or more"
    for gpu in host.gpus:
        for user in gpu.users:
            yield (
                f"GPU {gpu.index} ({gpu.uuid}) is used by {user}: a run leaves it out, unless hosts.share_gpus=true"
            )


def _limit(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="The folder of all runs.")
def doctor(as_json: bool, runs: Path) -> int:
    """Show what this machine has for a run: memory, packages, devices, disk; and what a run would stumble over.

    \b
    Examples:
      flexmarl doctor
      flexmarl doctor --json
      flexmarl doctor --runs /shared/runs
    """
    found = diagnose(runs)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    else:
        _show(Console(), found)
    return 1 if found.problems else 0


def _show(console: Console, found: Diagnosis) -> None:
    table = Table(show_header=False, box=None)
    host = found.host
    table.add_row("host", host.name)
    table.add_row("python", f"{host.python}, {found.platform}")
    table.add_row("cores", str(host.cores))
    table.add_row("memory", f"{host.memory_bytes / 2**30:.1f} GiB")
    free, size = host.shared_memory_free_bytes / 2**30, host.shared_memory_bytes / 2**30
    table.add_row("shared memory", f"{free:.1f} of {size:.1f} GiB free in {host.shared_memory}")
    seen = "perhaps seen by other hosts" if found.runs.shared else "seen by this host alone"
    room = f"{found.runs.free_bytes / 2**30:.1f} GiB free"
    table.add_row("runs", f"{room} in {found.runs.path}, {found.runs.file_system}: {seen}")
    table.add_row("memory to pin", _or_no_limit(found.locked_bytes and found.locked_bytes >> 20, " MiB"))
    table.add_row("open files", _or_no_limit(found.open_files, ""))
    for name, installed in {**host.packages, "nvidia-ml-py": found.nvidia_package}.items():
        table.add_row(name, installed or "not installed")
    for device in found.nvidia.devices:
        free, total = device.free_bytes / 2**30, device.total_bytes / 2**30
        used = "" if device.utilisation_percent is None else f", {device.utilisation_percent} % busy"
        peers = f", reads {', '.join(device.peers)}" if device.peers else ""
        table.add_row(device.uuid, f"{device.name}: {free:.1f} of {total:.1f} GiB free{used}{peers}")
    if host.gpus_note:
        table.add_row("GPUs", f"{len(host.gpus) or 'none'}: {host.gpus_note}")
    console.print(table)
    for problem in found.problems:
        console.print(problem, style="yellow", markup=False)


def _or_no_limit(limit: int | None, unit: str) -> str:
    return "no limit" if limit is None else f"{limit}{unit}"
