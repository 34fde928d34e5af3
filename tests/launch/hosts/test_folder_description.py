"""The folder of all runs: its disk, and the clock that dates its files."""

import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from flexmarl.launch.cli.doctor import doctor
from flexmarl.launch.hosts.diagnosis import diagnose
from flexmarl.launch.hosts.folder_description import FolderDescription, describe_folder

Mount = namedtuple("Mount", ["mountpoint", "fstype"])


def test_a_folder_that_is_not_there_yet_is_made_in_its_parent(tmp_path: Path) -> None:
    found = describe_folder(tmp_path / "new" / "runs")
    assert found.path == str(tmp_path) and found.clock_ahead_s == 0.0
    assert found.free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    assert not list(tmp_path.iterdir())


def test_the_innermost_mount_says_whether_other_hosts_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [Mount("/", "ext4"), Mount(str(tmp_path), "nfs4"), Mount(str(tmp_path / "x"), "xfs")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
    (tmp_path / "x").mkdir()
    for folder, kind, shared in ((tmp_path / "runs", "nfs4", True), (tmp_path / "x", "xfs", False)):
        found = describe_folder(folder)
        assert (found.file_system, found.shared) == (kind, shared)
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(doctor, ["--runs", str(tmp_path)]).output
    assert f"in {tmp_path}, nfs4: perhaps seen by other hosts" in shown


def test_a_folder_of_others_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert diagnose(tmp_path).problems[-1] == (
        f"no file can be written in {tmp_path}: Permission denied. Name another folder by --runs"
    )


def test_a_clock_that_differs_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + 90)
    [problem] = describe_folder(tmp_path).problems()
    assert f"of the file server of {tmp_path} differs by -90.0 s" in problem and "NTP" in problem


def test_a_full_disk_is_a_problem() -> None:
    [problem] = FolderDescription("/runs", "xfs", False, 5 << 20, 0.0, "").problems()
    assert problem.startswith("/runs has 5 MiB free")
