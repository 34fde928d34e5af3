"""The limits of control groups, read from made-up trees of both versions."""

from pathlib import Path

import pytest

from flexmarl.launch.hosts.cgroup import CgroupLimits, cgroup_limits

NO_LIMITS = CgroupLimits(None, None)


def limits(folder: Path, membership: str, files: dict[str, str]) -> CgroupLimits:
    (folder / "cgroup").write_text(membership)
    for name, text in files.items():
        file = folder / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return cgroup_limits(folder / "cgroup", folder / "mount")


def test_version_2(tmp_path: Path) -> None:
    files = {"jobs/one/cpu.max": "150000 100000\n", "jobs/one/memory.max": "max\n"}
    assert limits(tmp_path, "0::/jobs/one\n", files) == CgroupLimits(1.5, None)


def test_the_groups_above_count_too(tmp_path: Path) -> None:
    files = {
        "jobs/one/cpu.max": "max 100000\n",
        "jobs/cpu.max": "400000 100000\n",
        "jobs/one/memory.max": "9000\n",
        "jobs/memory.max": "7000\n",
    }
    assert limits(tmp_path, "0::/jobs/one\n", files) == CgroupLimits(4.0, 7000)


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    membership = "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n"
    files = {
        "memory/box/memory.limit_in_bytes": "5000\n",
        "cpu/box/cpu.cfs_quota_us": "200000\n",
        "cpu/box/cpu.cfs_period_us": "100000\n",
    }
    assert limits(tmp_path, membership, files) == CgroupLimits(2.0, 5000)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        {"cpu.max": "max 100000\n", "memory.max": "max\n"},
    ],
)
def test_without_a_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert limits(tmp_path, "2:memory:/\n1:cpu:/\n0::/\n", files) == NO_LIMITS


def test_in_a_container_the_tree_begins_with_the_group(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "5000\n"}
    assert limits(tmp_path, "4:memory:/of/the/host\n", files) == CgroupLimits(None, 5000)


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path / "missing", tmp_path) == NO_LIMITS
