"""A host as ``flexmarl doctor`` sees it: its means for a run, and the problems that a run would have."""

import os
import pwd
import resource
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .folder_description import FolderDescription, describe_folder
from .host_description import HostDescription, describe_host, version
from .nvidia import NvidiaDevices, read_devices

_LEAST_SHARED_MEMORY: Final = 1 << 30
_LEAST_OPEN_FILES: Final = 1024


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``host``: as the placement of actors sees it. ``user``: name and number. ``locked_bytes``: the most memory that a
    process may pin; ``open_files``: the most files and sockets that it may have open; None without a limit. ``runs``:
    the folder of all runs. ``problems``: each a sentence."""

    host: HostDescription
    user: str
    platform: str
    nvidia_package: str | None
    locked_bytes: int | None
    open_files: int | None
    nvidia: NvidiaDevices
    runs: FolderDescription
    problems: tuple[str, ...]


def diagnose(runs: Path = Path("runs")) -> Diagnosis:
    """Examines this host; read-only. ``runs``: the folder of all runs."""
    nvidia = read_devices()
    host = describe_host("", nvidia)
    locked, files = _limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE)
    folder = describe_folder(runs)
    return Diagnosis(
        host=host,
        user=_user(),
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
    if host.compiler_note:
        yield (
            f"torch.compile does not work here: {host.compiler_note}: policies are trained without it, in more time "
            "and memory"
        )
    if files is not None and files < _LEAST_OPEN_FILES:
        yield f"a process may have {files} files open: raise `ulimit -n` to {_LEAST_OPEN_FILES} or more"
    for gpu in host.gpus:
        for user in gpu.users:
            yield (
                f"GPU {gpu.index} ({gpu.uuid}) is used by {user}: a run leaves it out, unless hosts.share_gpus=true"
            )


def _user() -> str:
    number = os.getuid()
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:  # a container may know no name
        return f"({number})"


def _limit(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit
