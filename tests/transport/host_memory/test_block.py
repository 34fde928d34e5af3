import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.transport.errors import ArenaSpace, ForeignHandle
from flexmarl.transport.host_memory.arena import Arena
from flexmarl.transport.host_memory.block import (
    Block,
    file_bytes,
    free_bytes,
    remove_abandoned,
    try_lock,
)


def test_a_block_is_private_and_whole_from_the_start(tmp_path: Path) -> None:
    block = Block.create(tmp_path, "a.arena", 5000)
    status = (tmp_path / "a.arena").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 4096 + 8192 + 4096 == len(block.memory) == file_bytes(8192)
    assert status.st_blocks * 512 >= status.st_size
    assert (block.capacity, len(block.payload), Block.START) == (8192, 8192, 4096)


def test_a_block_is_a_sequence_lock(tmp_path: Path) -> None:
    writer = Block.create(tmp_path, "a.arena", 1)
    reader = Block.open(tmp_path, "a.arena")
    assert reader.generation == 0
    assert writer.begin(7, 10)
    assert (reader.generation, reader.version, reader.size_bytes) == (1, 7, 10)
    assert writer.begin(8, 11)  # the first writing was given up
    assert (reader.generation, reader.version, reader.size_bytes) == (1, 8, 11)
    assert writer.commit() == reader.generation == 2
    writer.revoke()
    assert reader.generation == 4
    assert not reader.begin(9, 1), "readers don't write"


def test_a_block_in_use_is_not_written_and_one_being_written_not_used(tmp_path: Path) -> None:
    writer = Block.create(tmp_path, "a.arena", 1)
    assert writer.begin(1, 1)
    assert Block.open_in_use(tmp_path, "a.arena") is None
    generation = writer.commit()
    used = Block.open_in_use(tmp_path, "a.arena")
    assert used is not None and writer.in_use
    assert not writer.begin(2, 1)
    assert writer.generation == generation
    view = used.payload
    del used
    assert not writer.begin(2, 1), "a view is enough"
    view.release()
    assert writer.begin(2, 1)


def test_what_a_user_writes_is_seen_by_nobody_else(tmp_path: Path) -> None:
    writer = Block.create(tmp_path, "a.arena", 10)
    used = Block.open_in_use(tmp_path, "a.arena")
    assert used is not None
    used.payload[0] = 7
    assert writer.payload[0] == 0


def test_a_mapping_for_writing_that_is_forgotten_leaves_no_descriptor(tmp_path: Path) -> None:
    block = Block.create(tmp_path, "1-0-a.arena", 100)

    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = descriptors()
    for _ in range(3):
        assert Block.open(tmp_path, block.name, writable=True).is_writable
    assert descriptors() == before
    block.close()


def test_two_writers_of_one_block_exclude_each_other(tmp_path: Path) -> None:
    owner = Block.create(tmp_path, "a.arena", 10)
    other = Block.open(tmp_path, "a.arena", writable=True)
    assert other.begin(1, 1) and not owner.begin(2, 1)
    other.end()
    assert owner.generation == 1, "unreadable"
    assert owner.begin(2, 1) and not other.begin(3, 1)


HOLDER = """
import pathlib, sys
from flexmarl.transport.host_memory.block import Block
directory = pathlib.Path(sys.argv[1])
block = Block.create(directory, "owned.arena", 10)
block.begin(1, 1)
print("ready", flush=True)
sys.stdin.read()
"""


def test_files_of_a_killed_owner_are_removed_and_of_a_living_one_are_not(tmp_path: Path) -> None:
    mine = Block.create(tmp_path, "mine.arena", 10)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        assert remove_abandoned(tmp_path) == []
        mapped = Block.open(tmp_path, "owned.arena")
        holder.kill()
        holder.wait()
        assert remove_abandoned(tmp_path) == ["owned.arena"]
    finally:
        holder.kill()
        holder.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.arena"]
    assert mapped.generation == 1, "the mapping stays"
    mine.close()
    del mine
    assert remove_abandoned(tmp_path) == ["mine.arena"]


def test_populating_takes_the_pages(tmp_path: Path) -> None:
    block = Block.create(tmp_path, "a.arena", 8 << 20)
    block.populate(4096, 4 << 20)
    smaps = Path("/proc/self/smaps").read_text()
    (resident,) = re.findall(rf"{tmp_path}/a\.arena\n(?:\w+: .*\n)*?Rss: +(\d+) kB", smaps)
    assert 4 << 10 <= int(resident) < 5 << 10


def test_mapping_a_large_block_touches_next_to_none_of_it(tmp_path: Path) -> None:
    """Touching all of it, in one system call of mmap, would hold the GIL for seconds."""
    owner = Block.create(tmp_path, "a.arena", 64 << 20)
    reader = Block.open(tmp_path, "a.arena")
    assert len(owner.memory) == len(reader.memory) > 64 << 20
    smaps = Path("/proc/self/smaps").read_text()
    resident = re.findall(rf"{tmp_path}/a\.arena\n(?:\w+: .*\n)*?Rss: +(\d+) kB", smaps)
    assert len(resident) == 2 and max(map(int, resident)) < 8 << 10


def test_memory_short_is_said_with_numbers(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)
    with pytest.raises(ArenaSpace) as raised:
        Block.create(tmp_path, "a.arena", free)
    assert raised.value.needed_bytes > free
    assert abs(raised.value.free_bytes - free) < free / 2
    assert str(raised.value.needed_bytes) in str(raised.value) and str(tmp_path) in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_no_file_stays_when_the_system_refuses_it(tmp_path: Path) -> None:
    program = """
import resource, sys, pathlib
from flexmarl.transport.host_memory.block import Block
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    Block.create(pathlib.Path(sys.argv[1]), "a.arena", 1 << 20)
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
def test_names_that_are_no_plain_block_name_are_refused(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "run"
    (directory / "sub").mkdir(parents=True)
    for place in (tmp_path, directory / "sub"):
        Block.create(place, "a.arena", 1)
    with pytest.raises(ForeignHandle, match="plain name"):
        Block.open(directory, name)


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    Block.create(tmp_path, "real.arena", 1)
    (directory / "link.arena").symlink_to(tmp_path / "real.arena")
    with pytest.raises(ForeignHandle, match="can't be opened"):
        Block.open(directory, "link.arena")


@pytest.mark.parametrize(
    "content", [b"", b"x" * 4096, b"flexblk1" + bytes(8184), b"flexblk1" + b"\xff" * 12280]
)
def test_a_file_that_is_no_block_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.arena").write_bytes(content)
    with pytest.raises(ForeignHandle, match="invalid arena file"):
        Block.open(tmp_path, "a.arena")


def test_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "directory.arena").mkdir()
    os.mkfifo(tmp_path / "pipe.arena")
    for name in ("directory.arena", "pipe.arena"):
        with pytest.raises(ForeignHandle):
            Block.open(tmp_path, name)
    with pytest.raises(FileNotFoundError):
        Block.open(tmp_path, "missing.arena")


def test_a_file_that_was_taken_for_abandoned_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[list[str]] = []

    def after_another_has_looked(descriptor: int, byte: int, *, exclusive: bool) -> bool:
        monkeypatch.setattr("flexmarl.transport.host_memory.block.try_lock", try_lock)
        removed.append(remove_abandoned(tmp_path))
        return try_lock(descriptor, byte, exclusive=exclusive)

    monkeypatch.setattr("flexmarl.transport.host_memory.block.try_lock", after_another_has_looked)
    block = Arena(tmp_path, "process").make(100, "weights")
    assert removed == [["process-0-weights.arena"]]
    assert [path.name for path in tmp_path.iterdir()] == [block.name] == ["process-1-weights.arena"]
