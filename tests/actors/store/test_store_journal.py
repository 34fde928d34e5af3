"""The store's journal: groups, damage at every byte, kills, full disks, compaction while appends continue."""

import asyncio
import errno
import itertools
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from flexmarl.actors.errors import StoreFull
from flexmarl.actors.store import store_journal as journal_module
from flexmarl.actors.store.store_journal import StoreJournal
from flexmarl.core.errors import FlexmarlError, JournalError

from ...full_disk import room_for

HEAD = b"flexmarl samples\x02\x00\x00\x00"
SOURCES = Path(__file__).parents[3] / "scripts" / "src"


def framed(body: bytes) -> bytes:
    return struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body


def read_naively(content: bytes) -> list[bytes]:
    """The bodies of the whole records, by the format's description."""
    bodies, rest = [], content[len(HEAD) :]
    while len(rest) >= 12:
        length, digest = struct.unpack("<IQ", rest[:12])
        body, rest = rest[12 : 12 + length], rest[12 + length :]
        if len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
            break
        bodies.append(body)
    return bodies


def ignore(body: bytes) -> None:
    pass


def recovered(content: bytes) -> list[bytes]:
    """The records that a store reads from this file when it starts; it can append to it then."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        path.write_bytes(content)
        found: list[bytes] = []

        async def append_more() -> None:
            async with StoreJournal.open(path, found.append) as journal:
                await journal.append(b"more")

        asyncio.run(append_more())
        assert read_naively(path.read_bytes()) == [*found, b"more"]
        return found


# --------------------------------------------------------------------------- damage

groups = st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=5), min_size=1, max_size=6)


async def write_groups(path: Path, groups: list[list[bytes]]) -> list[int]:
    """The file's size after each group was acknowledged."""
    sizes = []
    async with StoreJournal.open(path, ignore) as journal:
        for group in groups:
            await asyncio.gather(*[journal.append(record) for record in group])
            sizes.append(path.stat().st_size)
        statistics = journal.statistics()
        assert (statistics.groups, statistics.records) == (len(groups), sum(map(len, groups)))
    return sizes


@given(groups=groups, data=st.data())
@settings(deadline=None, max_examples=60)
def test_damage_costs_nothing_that_was_acknowledged_before_it(
    groups: list[list[bytes]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        sizes = asyncio.run(write_groups(path, groups))
        content = path.read_bytes()
    records = list(itertools.chain(*groups))
    assert content == HEAD + b"".join(map(framed, records))
    at = data.draw(st.integers(0, len(content)), label="cut at")
    acknowledged = sum(len(group) for group, size in zip(groups, sizes, strict=True) if size <= at)
    found = recovered(content[:at])
    assert found == records[: len(found)] and len(found) >= acknowledged

    at = data.draw(st.integers(len(HEAD), len(content) - 1), label="spoiled at")
    spoiled = bytearray(content)
    spoiled[at] ^= data.draw(st.integers(1, 255))
    acknowledged = sum(len(group) for group, size in zip(groups, sizes, strict=True) if size <= at)
    found = recovered(bytes(spoiled))
    assert found == records[: len(found)] and acknowledged <= len(found) < len(records)


@given(tail=st.binary(max_size=100), zeros=st.integers(0, 5000))
@settings(deadline=None)
def test_rubbish_at_the_end_is_cut_off(tail: bytes, zeros: int) -> None:
    assert recovered(HEAD + framed(b"first") + tail + bytes(zeros))[0] == b"first"


def test_a_cut_is_logged_with_figures(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(HEAD + framed(b"first") + framed(b"second")[:-1])
    with capture_logs() as logs:
        asyncio.run(StoreJournal.open(path, ignore).close())
    (line,) = logs
    assert (line["log_level"], line["kept_bytes"], line["cut_bytes"]) == ("warning", len(HEAD) + 17, 17)
    assert "claims 6 bytes, 5 are left" in line["problem"]


def test_another_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for content, problem in (
        (b"flexmarl replies\1\0\0\0", "does not begin as a journal does"),
        (b"flexmarl samples\1\0\0\0", "of version 1, and this program reads version 2"),
    ):
        path.write_bytes(content + framed(b"record"))
        with pytest.raises(JournalError, match=problem):
            StoreJournal.open(path, ignore)
        assert path.read_bytes() == content + framed(b"record")


def test_a_reader_that_raises_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    content = HEAD + framed(b"first") + b"torn"
    path.write_bytes(content)
    with pytest.raises(ZeroDivisionError):
        StoreJournal.open(path, mock.Mock(side_effect=ZeroDivisionError))
    assert path.read_bytes() == content
    asyncio.run(StoreJournal.open(path, ignore).close())


# --------------------------------------------------------------------------- groups


async def test_records_of_one_tick_are_one_write(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with StoreJournal.open(path, ignore) as journal:
        with mock.patch("os.write", wraps=os.write) as write:
            futures = [journal.append(b"%d" % number) for number in range(100)]
            assert not any(future.done() for future in futures)
            assert path.read_bytes() == HEAD
            futures[7].cancel()  # the caller may be cancelled; the record stays
            await asyncio.wait(futures)
            assert write.call_count == 1
        assert read_naively(path.read_bytes()) == [b"%d" % number for number in range(100)]
    assert path.stat().st_mode & 0o7777 == 0o600


async def test_closing_writes_what_waits(tmp_path: Path) -> None:
    journal = StoreJournal.open(tmp_path / "journal", ignore)
    future = journal.append(b"record")
    await journal.close()
    await journal.close()
    assert future.done() and future.exception() is None
    assert read_naively((tmp_path / "journal").read_bytes()) == [b"record"]
    with pytest.raises(JournalError, match="it is closed"):
        journal.append(b"record")
    with pytest.raises(JournalError, match="it is closed"):
        await journal.compact([])


async def test_a_record_that_is_too_long_is_refused(tmp_path: Path) -> None:
    async with StoreJournal.open(tmp_path / "journal", ignore) as journal:
        with mock.patch.object(journal_module, "RECORD_LIMIT_BYTES", 10):
            await journal.append(bytes(10))
            with pytest.raises(JournalError, match="of 11 bytes is too long"):
                journal.append(bytes(11))


# --------------------------------------------------------------------------- full disks


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


# --------------------------------------------------------------------------- compaction


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
@settings(deadline=None, max_examples=60)
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


# --------------------------------------------------------------------------- processes

_WRITER = """
import asyncio, itertools, os, sys
from pathlib import Path
from flexmarl.actors.store import store_journal as module
module._CHUNK_BYTES = 2**12
latest = {}
def read(body):
    latest[body[:1]] = int.from_bytes(body[1:9], "big")
async def client(journal, name):
    for number in itertools.count(latest.get(name, -1) + 1):
        latest[name] = number
        await journal.append(name + number.to_bytes(8, "big") * 50)
        os.write(1, name + number.to_bytes(8, "big"))
async def main():
    journal = module.StoreJournal.open(Path(sys.argv[1]), read)
    async with asyncio.TaskGroup() as tasks:
        for name in (b"a", b"b", b"c"):
            tasks.create_task(client(journal, name))
        while True:
            snapshot = [name + number.to_bytes(8, "big") * 50 for name, number in latest.items()] * 20
            await journal.compact(snapshot)
            await asyncio.sleep(0)
asyncio.run(main())
"""


@contextmanager
def process(script: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def test_what_a_killed_process_has_acknowledged_is_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for count in (1, 500, 1500):
        with process(_WRITER, str(path)) as child:
            assert child.stdout is not None
            said = child.stdout.read(9 * count)
            child.kill()  # while it writes and compacts
            said += child.stdout.read()
        assert child.returncode == -9
        latest: dict[bytes, int] = {}

        def read(body: bytes, latest: dict[bytes, int] = latest) -> None:
            name, number = body[:1], int.from_bytes(body[1:9], "big")
            assert body[1:] == body[1:9] * 50
            assert number in (latest.get(name, number), latest.get(name, number) + 1), "none is left out"
            latest[name] = number

        asyncio.run(StoreJournal.open(path, read).close())
        for start in range(0, len(said), 9):
            name, number = said[start : start + 1], int.from_bytes(said[start + 1 : start + 9], "big")
            assert latest[name] >= number


_HOLDER = """
import asyncio, sys
from pathlib import Path
from flexmarl.actors.store.store_journal import StoreJournal
async def main():
    journal = StoreJournal.open(Path(sys.argv[1]), print)
    if sys.argv[2] == "compact":
        await journal.compact([])
    print("open", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


@pytest.mark.parametrize("also", ["", "compact"])
def test_two_processes_cannot_have_it(tmp_path: Path, also: str) -> None:
    path = tmp_path / "journal"
    with process(_HOLDER, str(path), also) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(JournalError, match="another process has it open"):
            StoreJournal.open(path, ignore)
    nothing: Any = asyncio.run(StoreJournal.open(path, ignore).close())
    assert nothing is None
