"""The store's journal: compaction while appends continue, and kills at any moment of one."""

import asyncio
import errno
import itertools
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.errors import StoreFull
from flexmarl.actors.store import store_journal as journal_module
from flexmarl.actors.store.store_journal import StoreJournal
from flexmarl.core.errors import FlexmarlError, JournalError

from ...full_disk import room_for
from .journal_format import HEAD, ignore, read_naively


class Counters:
    """A state whose records say which counter is how high; the highest number is how many were appended."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def apply(self, body: bytes) -> None:
        key, count = struct.unpack("<II", body[:8])
        assert self.counts.get(key, 0) == count - 1 or key not in self.counts, "every step once, in order"
        self.counts[key] = count

    def add(self, key: int) -> bytes:
        self.counts[key] = self.counts.get(key, 0) + 1
        return struct.pack("<II", key, self.counts[key]) + bytes(key)

    def snapshot(self) -> Iterator[bytes]:
        items = list(self.counts.items())
        return (struct.pack("<II", key, count) + bytes(key) for key, count in items)


def counts_of(path: Path) -> dict[int, int]:
    counters = Counters()
    for body in read_naively(path.read_bytes()):
        counters.apply(body)
    return counters.counts


@given(
    steps=st.lists(
        st.one_of(st.integers(0, 20), st.sampled_from(["compact", "tick", "cancel"])), max_size=60
    ),
)
@settings(max_examples=60)
def test_a_kill_at_any_moment_of_a_compaction_loses_nothing(steps: list[int | str]) -> None:
    async def run(path: Path) -> None:
        state = Counters()
        acknowledged: dict[int, int] = {}
        appends: set[asyncio.Task[None]] = set()
        compaction: asyncio.Task[None] | None = None

        async def append(key: int) -> None:
            future = journal.append(state.add(key))
            count = state.counts[key]
            await future
            acknowledged[key] = max(count, acknowledged.get(key, 0))

        async with StoreJournal.open(path, ignore) as journal:
            for step in steps:
                match step:
                    case int(key):
                        appends.add(asyncio.create_task(append(key)))
                        await asyncio.sleep(0)
                    case "compact" if compaction is None or compaction.done():
                        compaction = asyncio.create_task(journal.compact(state.snapshot()))
                    case "cancel" if compaction is not None:
                        compaction.cancel()
                    case _:
                        await asyncio.sleep(0)
                found = counts_of(path)
                assert all(found.get(key, 0) >= count for key, count in acknowledged.items())
                assert all(count <= state.counts[key] for key, count in found.items())
            if appends:
                await asyncio.wait(appends)
            if compaction is not None:
                await asyncio.wait([compaction])
                assert compaction.cancelled() or compaction.exception() is None
            await journal.compact(state.snapshot())
            assert counts_of(path) == state.counts == acknowledged
        assert [file.name for file in path.parent.iterdir()] == ["journal"]

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(journal_module, "_CHUNK_BYTES", 40),
    ):
        asyncio.run(run(Path(folder) / "journal"))


async def test_appends_continue_during_a_compaction(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    yielded = 0

    def snapshot() -> Iterator[bytes]:
        nonlocal yielded
        for yielded in range(1000):  # noqa: B007
            yield b"s" * 88

    async with StoreJournal.open(path, ignore) as journal:
        await journal.append(b"old")
        with mock.patch.object(journal_module, "_CHUNK_BYTES", 1000):
            compaction = asyncio.create_task(journal.compact(snapshot()))
            during = 0
            seen = []
            while not compaction.done():
                await journal.append(b"during")
                during += 1
                seen.append(yielded)
            await compaction
        assert during > 50
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 30, "a piece per tick"
        await journal.append(b"after")
        assert journal.statistics().compactions == 1
    expected = [b"s" * 88] * 1000 + [b"during"] * during + [b"after"]
    assert read_naively(path.read_bytes()) == expected


async def test_a_compaction_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def broken() -> Iterator[bytes]:
        yield b"new"
        raise ZeroDivisionError

    async with StoreJournal.open(path, ignore) as journal:
        await journal.append(b"old")
        with pytest.raises(ZeroDivisionError):
            await journal.compact(broken())
        with room_for(path.stat().st_size + 10), pytest.raises(StoreFull):
            await journal.compact([bytes(100)])
        with (
            mock.patch("pathlib.Path.replace", side_effect=OSError(errno.EIO, "I/O error")),
            pytest.raises(JournalError, match="I/O error"),
        ):
            await journal.compact([b"new"])
        forgotten = journal.compact([b"new"])
        forgotten.close()  # a task that was cancelled before it began
        assert [file.name for file in tmp_path.iterdir()] == ["journal"]
        await journal.append(b"still good")
        assert read_naively(path.read_bytes()) == [b"old", b"still good"]
        await journal.compact([b"new"])
        assert read_naively(path.read_bytes()) == [b"new"]


async def test_one_compaction_at_a_time(tmp_path: Path) -> None:
    async with StoreJournal.open(tmp_path / "journal", ignore) as journal:
        first, second = journal.compact([b"first"]), journal.compact([b"second"])
        task = asyncio.create_task(first)
        await asyncio.sleep(0)
        with pytest.raises(JournalError, match="being compacted"):
            await second
        with pytest.raises(JournalError, match="cancel that first"):
            await journal.close()
        stale = journal.compact([b"stale"])
        await task
        with pytest.raises(JournalError, match="it was compacted, since"):
            await stale
        assert read_naively(journal.path.read_bytes()) == [b"first"]


async def test_a_snapshot_of_what_was_taken_back_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with StoreJournal.open(path, ignore) as journal:
        with room_for(len(HEAD) + 5):
            future = journal.append(b"record")
            with pytest.raises(JournalError, match="taken back"):
                await journal.compact([b"record"])
            with pytest.raises(StoreFull):
                await future
    assert path.read_bytes() == HEAD


async def test_compaction_is_due_as_the_file_grows(tmp_path: Path) -> None:
    with mock.patch.object(journal_module, "_SLACK_BYTES", 1000):
        async with StoreJournal.open(tmp_path / "journal", ignore) as journal:

            def is_due() -> bool:
                return journal.compaction_is_due

            assert not is_due()
            await journal.append(bytes(1000))
            assert is_due()
            with pytest.raises(FlexmarlError), room_for(1500):
                await journal.compact([bytes(2000)])
            assert not is_due(), "not again before it has grown"
            await journal.append(bytes(1000))
            assert is_due()
            await journal.compact([bytes(500)])
            assert not is_due()
            await journal.append(bytes(1400))
            assert not is_due()
            await journal.append(bytes(200))
            assert is_due()
