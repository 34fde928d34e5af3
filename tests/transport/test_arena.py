import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.transport.arena import Arena, check_directory, free_bytes
from flexmarl.transport.errors import ArenaSpace, ForeignHandle, UnsafeDirectory


def test_an_arena_is_private_and_whole_from_the_start(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, "a.arena", 5000)
    status = (tmp_path / "a.arena").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 4096 + 2 * 8192 == len(arena.memory)
    assert status.st_blocks * 512 >= status.st_size
    assert [arena.offset(slot) for slot in (0, 1)] == [4096, 4096 + 8192]


def test_a_slot_is_a_sequence_lock(tmp_path: Path) -> None:
    writer = Arena.create(tmp_path, "a.arena", 1)
    reader = Arena.open(tmp_path, "a.arena")
    assert reader.generation(1) == 0
    writer.begin(1, 7)
    assert (reader.generation(1), reader.version(1)) == (1, 7)
    writer.begin(1, 8)  # the first writing was given up
    assert (reader.generation(1), reader.version(1)) == (1, 8)
    assert writer.commit(1) == reader.generation(1) == 2
    assert reader.generation(0) == 0


def test_mapping_a_large_arena_touches_next_to_none_of_it(tmp_path: Path) -> None:
    """Touching all of it, in one system call of mmap, would hold the GIL for seconds."""
    owner = Arena.create(tmp_path, "a.arena", 32 << 20)
    reader = Arena.open(tmp_path, "a.arena")
    assert len(owner.memory) == len(reader.memory) > 64 << 20
    smaps = Path("/proc/self/smaps").read_text()
    resident = re.findall(rf"{tmp_path}/a\.arena\n(?:\w+: .*\n)*?Rss: +(\d+) kB", smaps)
    assert len(resident) == 2 and max(map(int, resident)) < 8 << 10


def test_memory_short_is_said_with_numbers(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)
    with pytest.raises(ArenaSpace) as raised:
        Arena.create(tmp_path, "a.arena", free)
    assert raised.value.needed_bytes > 2 * free
    assert abs(raised.value.free_bytes - free) < free / 2
    assert str(raised.value.needed_bytes) in str(raised.value) and str(tmp_path) in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_no_file_stays_when_the_system_refuses_it(tmp_path: Path) -> None:
    program = """
import resource, sys, pathlib
from flexmarl.transport.arena import Arena
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    Arena.create(pathlib.Path(sys.argv[1]), "a.arena", 1 << 20)
except OSError as error:
    sys.exit(0 if "large" in str(error) else 2)
sys.exit(3)
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, env=environment)
    assert list(tmp_path.iterdir()) == []


FOREIGN_NAMES = [
    "../a.arena",
    "/etc/passwd",
    "sub/a.arena",
    "..",
    "",
    ".a.arena",
    "a.arena\n",
    "a",
    "\0.arena",
]


@pytest.mark.parametrize("name", [*FOREIGN_NAMES, 300 * "x" + ".arena"])
def test_names_that_are_no_plain_arena_name_are_refused(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "run"
    (directory / "sub").mkdir(parents=True)
    for place in (tmp_path, directory / "sub"):
        Arena.create(place, "a.arena", 1)
    with pytest.raises(ForeignHandle, match="plain name"):
        Arena.open(directory, name)


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    Arena.create(tmp_path, "real.arena", 1)
    (directory / "link.arena").symlink_to(tmp_path / "real.arena")
    with pytest.raises(ForeignHandle, match="can't be opened"):
        Arena.open(directory, "link.arena")


@pytest.mark.parametrize(
    "content", [b"", b"x" * 4096, b"flexarn1" + bytes(4096), b"flexarn1" + b"\xff" * 12280]
)
def test_a_file_that_is_no_arena_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.arena").write_bytes(content)
    with pytest.raises(ForeignHandle, match="invalid arena file"):
        Arena.open(tmp_path, "a.arena")


def test_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "directory.arena").mkdir()
    os.mkfifo(tmp_path / "pipe.arena")
    for name in ("directory.arena", "pipe.arena"):
        with pytest.raises(ForeignHandle):
            Arena.open(tmp_path, name)
    with pytest.raises(FileNotFoundError):
        Arena.open(tmp_path, "missing.arena")


def test_a_directory_others_can_enter_is_refused(tmp_path: Path) -> None:
    check_directory(tmp_path)
    with pytest.raises(UnsafeDirectory, match="not a directory"):
        check_directory(tmp_path / "missing")
    tmp_path.chmod(0o750)
    with pytest.raises(UnsafeDirectory, match="0750"):
        check_directory(tmp_path)
