"""Private folders: those of killed processes are removed, those in use never; a given one is checked."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.core.durable.private_directory import PrivateDirectory, check_private, use_with_others
from flexmarl.core.errors import UnsafeDirectory
from flexmarl.core.system import ActorSystem

ROOT = Path(__file__).parents[3]
MAKE = """
import sys
from pathlib import Path
from flexmarl.core.durable.private_directory import PrivateDirectory, use_with_others
if sys.argv[1] == "make":
    directory = PrivateDirectory(Path(sys.argv[2]))
    (directory.path / "content").write_text("x")
    print(directory.path, flush=True)
else:
    use_with_others(Path(sys.argv[2]))
    print("used", flush=True)
sys.stdin.read()
"""


class Process:
    """A process that makes or uses a folder, until it is killed."""

    def __init__(self, what: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", MAKE, what, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "src")},
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdin is not None
        self.line = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


def test_folders_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    killed, alive, left_to_a_child = (Process("make", tmp_path) for _ in range(3))
    child = Process("use", Path(left_to_a_child.line))
    try:
        killed.kill()
        left_to_a_child.kill()
        (tmp_path / "flexmarl-abcdefgh").mkdir()  # another program's
        first = PrivateDirectory(tmp_path)
        assert not Path(killed.line).exists()
        for used in (alive.line, left_to_a_child.line):
            assert (Path(used) / "content").exists()
        assert (tmp_path / "flexmarl-abcdefgh").exists()
        child.kill()
        second = PrivateDirectory(tmp_path)
        assert not Path(left_to_a_child.line).exists()
        assert first.path.exists() and Path(alive.line).exists()
        for directory in (first, second):
            directory.remove()
            directory.remove()
            assert not directory.path.exists()
    finally:
        alive.kill()
        child.kill()
    assert list(tmp_path.glob(".*")) == []


def test_several_that_begin_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    for _ in range(2):  # the second time beside the folders of the first
        processes = [Process("make", tmp_path) for _ in range(4)]
        try:
            assert all((Path(process.line) / "content").exists() for process in processes)
        finally:
            for process in processes:
                process.kill()
    PrivateDirectory(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_can_be_used_no_more(tmp_path: Path) -> None:
    use_with_others(tmp_path / "gone")


@pytest.mark.parametrize(
    ("mode", "problem"), [(0o755, "0755: other users"), (0o710, "0710: other"), (0o500, "can't make files")]
)
async def test_a_system_refuses_a_folder_that_others_may_enter(
    tmp_path: Path, mode: int, problem: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    folder.chmod(mode)
    with pytest.raises(UnsafeDirectory, match=f"{problem}.*`chmod 700 {folder}`"):
        async with ActorSystem("service", folder):
            pass
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    async with ActorSystem("service", folder):
        pass


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeDirectory, match=f"it belongs to user {os.getuid()}, not {os.getuid() + 1}"):
        check_private(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(UnsafeDirectory, match="it is a file"):
        check_private(tmp_path / "file")
    with pytest.raises(UnsafeDirectory, match="it does not exist"):
        check_private(tmp_path / "missing")
