"""Selects the path of a state, by a pure table: the first path that reaches the destination."""

import functools
import socket
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import NoPath
from .handle import PathName


@dataclass(frozen=True, slots=True)
class Place:
    """One process on one host (a machine). ``process`` is unique in the run, not only on its host."""

    host: str
    process: str


@functools.cache
def this_host() -> str:
    """The identity of this machine: boot id and host name.

    The boot id distinguishes machines of the same name; the name distinguishes containers on one kernel, which share
    no memory.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{socket.gethostname()}"


def _same_process(source: Place, destination: Place | None) -> bool:
    return source == destination


def _same_host(source: Place, destination: Place | None) -> bool:
    return destination is None or source.host == destination.host


# Fastest first.
_TABLE: Final[dict[PathName, Callable[[Place, Place | None], bool]]] = {
    "local": _same_process,
    "shm": _same_host,
}


def select_path(source: Place, destination: Place | None, *, devices: Set[str], size_bytes: int) -> PathName:
    """The path for ``size_bytes`` on ``devices`` (device types) from ``source`` to ``destination``.

    A destination of None means any process of the source's host. Raises NoPath if no path reaches it.
    """
    for path, reaches in _TABLE.items():
        if reaches(source, destination):
            return path
    raise NoPath(source.host, destination.host if destination else source.host, _what(devices, size_bytes))


def check_reach(
    path: PathName, source: Place, destination: Place, *, devices: Set[str], size_bytes: int
) -> None:
    """Raises NoPath if a state set at ``source`` for ``path`` can't be read at ``destination``.

    No other path is tried: a silent downgrade is an error.
    """
    if not _TABLE[path](source, destination):
        boundary = "host" if source.host != destination.host else "process"
        raise NoPath(
            f"{source.host}, process {source.process}",
            f"{destination.host}, process {destination.process}",
            f"{_what(devices, size_bytes)}; path {path!r} does not leave its {boundary}",
        )


def _what(devices: Set[str], size_bytes: int) -> str:
    return f"{size_bytes} bytes on {', '.join(sorted(devices)) or 'no device'}"
