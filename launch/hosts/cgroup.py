"""The limits of this process's control group (cgroup): a container, a Slurm job or a systemd unit sets them.

Version 2 has one tree, with ``cpu.max`` and ``memory.max``; version 1 has a tree for each controller. The limits of the
groups above count too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NO_LIMIT: Final = 1 << 60
"""Version 1 writes a number near 2**63 if there is no limit."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """``cores``: processor time per time, 1.5 is one and a half cores. None without a limit."""

    cores: float | None
    memory_bytes: int | None


def cgroup_limits(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> CgroupLimits:
    """The least of the limits that hold for this process. ``membership``: lines of ``number:controllers:group``.
    ``mount``: the folder of the trees. A file that is missing sets no limit."""
    cores = []
    memory = []
    for controllers, group in _groups(membership):
        for folder in _with_parents(mount, controllers, group):
            cores += [_quota(*_numbers(folder / "cpu.max"))]
            cores += [_quota(*_numbers(folder / "cpu.cfs_quota_us"), *_numbers(folder / "cpu.cfs_period_us"))]
            memory += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
    return CgroupLimits(
        cores=min((limit for limit in cores if limit is not None), default=None),
        memory_bytes=min((limit for limit in memory if 0 < limit < _NO_LIMIT), default=None),
    )


def _groups(membership: Path) -> Iterator[tuple[list[str], str]]:
    """The controllers of each tree, none for that of version 2, and the group of this process in it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        yield [name for name in controllers.split(",") if name], group


def _with_parents(mount: Path, controllers: list[str], group: str) -> Iterator[Path]:
    """The folders of a group and of those above it. In a container the tree may begin with the group itself."""
    for tree in [mount / name for name in controllers] if controllers else [mount, mount / "unified"]:
        folder = tree / group.lstrip("/")
        yield from (part for part in (folder, *folder.parents) if part.is_relative_to(tree))


def _numbers(file: Path) -> list[int]:
    """The numbers in a file of limits; none if the file is missing or its limit is ``max``."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []


def _quota(quota: int = -1, period: int = 0) -> float | None:
    return quota / period if quota > 0 and period > 0 else None
