"""Selects the source that a state is read from, by a pure table: the first path that reaches the reader."""

import functools
import socket
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .errors import NoPath
from .handle import CudaIpcSource, PathName, ShmSource, Source, TcpSource


@dataclass(frozen=True, slots=True)
class Place:
    """One process of a node (``this_node``). ``process`` is unique in the run, not only on its node."""

    node: str
    process: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The source to read from, and the reason. ``refused``: the reason against each source that is faster."""

    path: PathName
    source: Source
    reason: str
    refused: dict[PathName, str] = field(default_factory=dict)

    @property
    def is_downgrade(self) -> bool:
        """True if device memory was offered that this process can't use: a loss of speed that has to be seen."""
        return "cuda_ipc" in self.refused


def this_node(runtime_dir: Path) -> str:
    """The identity of a node: the processes of a machine that share memory in ``runtime_dir``, a directory on tmpfs.

    The boot id distinguishes machines of the same name; the name distinguishes containers on one kernel, which share
    no memory; the directory distinguishes nodes of one machine.
    """
    return f"{_this_machine()}:{runtime_dir.absolute()}"


@functools.cache
def _this_machine() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class Reader:
    """The process that reads. Its devices by UUID: those ``visible``, and the pairs of which the first is known to be
    unable to read the memory of the second. ``refusals``: by process and device, the reason why memory could not be
    opened here before. ``encrypted``: if it encrypts what it exchanges with other hosts; None: it has no keys for
    that."""

    place: Place
    visible: frozenset[str] = frozenset()
    unreachable: frozenset[tuple[str, str]] = frozenset()
    refusals: Mapping[tuple[str, str], str] = field(default_factory=dict)
    encrypted: bool | None = None


CPU: Final = "cpu"


def _cuda_ipc(reader: Reader, source: CudaIpcSource, devices: Set[str]) -> tuple[bool, str]:
    if source.node != reader.place.node:
        return False, f"it does not leave its node {source.node}"
    if source.process == reader.place.process:
        return False, "a process can't open its own device memory"
    if not reader.visible:
        return False, "this process has no device"
    if refusal := reader.refusals.get((source.process, source.device)):
        return False, refusal
    # No rule that the source's device be visible: a process that sees its own card alone opens the memory of another
    # card on its own. Only an attempt shows whether the two reach each other.
    for device in sorted(devices - {CPU}):
        if (device, source.device) in reader.unreachable:
            return False, f"device {device} can't read the memory of {source.device}"
    return True, f"the same node: memory of device {source.device}"


def _shm(reader: Reader, source: ShmSource, devices: Set[str]) -> tuple[bool, str]:
    if source.node != reader.place.node:
        return False, f"it does not leave its node {source.node}"
    return True, "the same node: shared memory"


def _tcp(reader: Reader, source: TcpSource, devices: Set[str]) -> tuple[bool, str]:
    if reader.encrypted is None:
        return False, "this process exchanges no states with other hosts"
    if reader.encrypted != source.encrypted:
        here, there = ("encrypted" if which else "plain" for which in (reader.encrypted, source.encrypted))
        return False, f"it is {there}, and this process reads {here} ones only"
    return True, f"over the network from {source.address}"


_RULES: Final[dict[PathName, Callable[[Reader, Any, Set[str]], tuple[bool, str]]]] = {
    "cuda_ipc": _cuda_ipc,
    "shm": _shm,
    "tcp": _tcp,
}
"""By path: true if the source reaches tensors on ``devices`` in the reader's process, and the reason."""

# Fastest first. For tensors on CPUs that is shared memory: bytes of a device would have to cross its bus. The network
# is last in both: it has the lowest rate and the most ways to fail.
_TO_DEVICES: Final[tuple[PathName, ...]] = ("cuda_ipc", "shm", "tcp")
_TO_CPU: Final[tuple[PathName, ...]] = ("shm", "cuda_ipc", "tcp")


def choose(
    reader: Reader,
    sources: Sequence[Source],
    *,
    devices: Set[str],
    size_bytes: int,
    path: PathName | None = None,
    withheld: Mapping[PathName, str] | None = None,
) -> Choice:
    """The source for ``size_bytes`` that go to ``devices`` (UUIDs, or CPU): the fastest that reaches them.
    ``withheld``: see ``StateHandle``; a faster path that is not offered counts as refused, with that reason.

    With ``path`` no other is taken. Raises NoPath, with the reason against every source.
    """
    offered = {source.path: source for source in sources}
    refused: dict[PathName, str] = {}
    for name in _TO_DEVICES if devices - {CPU} else _TO_CPU:
        source = offered.get(name)
        if path not in (None, name):
            continue
        if source is None:
            if withheld and name in withheld:
                refused[name] = withheld[name]
            continue
        reaches, reason = _RULES[name](reader, source, devices)
        if reaches:
            return Choice(name, source, f"forced; {reason}" if path else reason, refused)
        refused[name] = reason
    if path is not None and path not in {*offered, *refused}:
        refused[path] = f"not offered (there is {', '.join(offered) or 'no source'})"
    place = f"{reader.place.node}, process {reader.place.process}"
    raise NoPath(place, sorted(devices), size_bytes, {str(name): why for name, why in refused.items()})
