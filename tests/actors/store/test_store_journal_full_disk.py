"""The store's journal on full disks."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from flexmarl.actors.errors import StoreFull
from flexmarl.actors.store.store_journal import StoreJournal

from ...full_disk import room_for
from ...processes import SOURCES
from .journal_format import HEAD, framed, ignore, read_naively


async def test_on_a_full_disk_nothing_is_acknowledged_and_all_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    undone: list[int] = []
    async with StoreJournal.open(path, ignore) as journal:
        await journal.append(b"before")
        before = path.read_bytes()
        with room_for(len(before) + 60):  # two of the three fit, and a part of the third
            futures = [journal.append(bytes(10), lambda n=n: undone.append(n)) for n in range(3)]  # type: ignore[misc]
            results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(result) for result in results] == [StoreFull] * 3
        assert "no room for 66 bytes" in str(results[0]) and str(path) in str(results[0])
        assert undone == [2, 1, 0]
        assert path.read_bytes() == before
        await journal.append(b"after")
        assert journal.statistics().failures == 1
    assert read_naively(path.read_bytes()) == [b"before", b"after"]


async def test_a_file_that_cannot_be_cut_now_is_cut_later(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with StoreJournal.open(path, ignore) as journal:
        with (
            room_for(len(HEAD) + 5),
            mock.patch("os.ftruncate", side_effect=OSError(errno.EIO, "I/O error")),
            pytest.raises(StoreFull),
        ):
            await journal.append(b"record")
        assert path.stat().st_size == len(HEAD) + 5
        await journal.append(b"after")
    assert path.read_bytes() == HEAD + framed(b"after")


_FULL = """
import asyncio, errno, subprocess, sys
from pathlib import Path
from flexmarl.actors.store.segment_arena import ArenaLimits, SegmentArena, SegmentDirectories
from flexmarl.actors.store.store_journal import StoreJournal
from flexmarl.actors.errors import StoreFull

async def main(folder):
    acknowledged = []
    async with StoreJournal.open(folder / "journal", print) as journal:
        for number in range(1000):
            record = number.to_bytes(4, "big") * 1000
            try:
                await journal.append(record)
            except StoreFull as error:
                assert "No space left on device" in str(error)
                break
            acknowledged.append(record)
        assert 200 < len(acknowledged) < 300
        try:
            await journal.compact(acknowledged)
        except StoreFull:
            pass
        else:
            raise AssertionError("there was room")
        (folder / "ballast").unlink()
        await journal.append(b"there is room again")
        await journal.compact(acknowledged[:10])
    found = []
    async with StoreJournal.open(folder / "journal", found.append):
        assert found == acknowledged[:10]

    arena = SegmentArena(SegmentDirectories(folder / "memory", folder / "disk"), ArenaLimits(2**18, 2**30, 2**30, 0))
    grants = []
    try:
        while len(grants) < 100:
            grants.append(arena.grant("a"))
    except StoreFull as error:
        assert "No space left on device" in str(error)
    assert 2 <= len(grants) <= 16
    arena.seal("a", [grants.pop().segment])
    arena.grant("a")

folder = Path(sys.argv[1])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(folder)]).returncode:
    sys.exit(77)
(folder / "ballast").write_bytes(bytes(3 * 2**20))
asyncio.run(main(folder))
"""


def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    """In a mount namespace of its own, where that is allowed."""
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", _FULL, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare(1) here")
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no mount of one's own here: {done.stderr}")
    assert done.returncode == 0, done.stderr
