"""The files of a folder after a loss of power."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from flexmarl.core.durable.files import replace_private, sync, sync_folder
from flexmarl.launch.simulate.simulated_disk import SimulatedDisk

SEEDS = range(40)


def contents_after(folder: Path, work: Callable[[Path], None]) -> set[bytes | None]:
    """All contents that the file ``file`` has after a loss of power, of 40 drawn ones; None: it is missing."""
    found: set[bytes | None] = set()
    for seed in SEEDS:
        place = folder / str(seed)
        place.mkdir()
        disk = SimulatedDisk(place, random.Random(seed))
        with disk.watched():
            work(place)
            disk.lose_power()
            (place / "file").write_bytes(b"written by a process without power")
            disk.restore()
        file = place / "file"
        found.add(file.read_bytes() if file.exists() else None)
    return found


def test_a_file_that_was_not_forced_is_whole_cut_short_or_missing(tmp_path: Path) -> None:
    found = contents_after(tmp_path, lambda place: replace_private(place / "file", b"12345678"))
    assert {None, b"12345678"} < found
    assert all(content is None or b"12345678".startswith(content) for content in found)


def test_a_forced_file_is_whole_if_its_folder_was_forced_too(tmp_path: Path) -> None:
    def write(place: Path) -> None:
        replace_private(place / "file", b"12345678", durable=True)

    def write_both(place: Path) -> None:
        write(place)
        sync(place)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert contents_after(tmp_path / "a", write) == {None, b"12345678"}
    assert contents_after(tmp_path / "b", write_both) == {b"12345678"}


def test_in_place_of_a_new_file_the_old_one_may_be_there(tmp_path: Path) -> None:
    def write(place: Path) -> None:
        for content in (b"old", b"new"):
            replace_private(place / "file", content, durable=True)
            if content == b"old":
                sync(place)

    assert contents_after(tmp_path, write) == {b"old", b"new"}


def test_an_appended_part_is_there_in_part(tmp_path: Path) -> None:
    def write(place: Path) -> None:
        file = os.open(place / "file", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, b"forced ")
        os.fsync(file)
        sync(place)
        os.write(file, b"appended")
        os.close(file)

    found = contents_after(tmp_path, write)
    assert b"forced appended" in found and len(found) > 3
    assert all(content is not None and content.startswith(b"forced ") for content in found)


def test_a_removal_may_be_lost(tmp_path: Path) -> None:
    def write(place: Path) -> None:
        replace_private(place / "file", b"1")
        sync_folder(place)
        (place / "file").unlink()

    assert contents_after(tmp_path, write) == {None, b"1"}


def test_a_full_disk_refuses_appended_parts_of_its_own_files_alone(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = SimulatedDisk(tmp_path / "disk", random.Random(1))
    with (
        disk.watched(),
        (tmp_path / "disk" / "file").open("wb") as file,
        (tmp_path / "other").open("wb") as other,
    ):
        os.write(file.fileno(), b"1")
        disk.is_full = True
        os.write(other.fileno(), b"2")
        with pytest.raises(OSError, match="No space left"):
            os.write(file.fileno(), b"3")
        disk.is_full = False
        os.write(file.fileno(), b"4")
    assert (tmp_path / "disk" / "file").read_bytes() == b"14" and (tmp_path / "other").read_bytes() == b"2"


def test_no_error_leaves_a_watch_behind(tmp_path: Path) -> None:
    fsync = os.fsync
    with pytest.raises(ValueError), SimulatedDisk(tmp_path, random.Random(1)).watched():
        assert os.fsync is not fsync
        raise ValueError
    assert os.fsync is fsync
