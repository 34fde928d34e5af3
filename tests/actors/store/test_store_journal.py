"""The store's journal: groups, damage at every byte, foreign files."""

import asyncio
import itertools
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from flexmarl.actors.store import store_journal as journal_module
from flexmarl.actors.store.store_journal import StoreJournal
from flexmarl.core.errors import JournalError

from .journal_format import HEAD, framed, ignore, read_naively


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
@settings(max_examples=60)
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
        (b"flexmarl samples\3\0\0\0", "of version 3, and this program reads version 4"),
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
