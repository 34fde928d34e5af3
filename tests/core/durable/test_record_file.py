"""The file of a journal of replies: foreign files, and damage."""

import os
import struct
import tempfile
from pathlib import Path

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from flexmarl.core.durable.reply_journal import ReplyJournal
from flexmarl.core.errors import JournalError

from .journals import HEAD, filled


def test_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with ReplyJournal.open(path) as journal:
        assert path.stat().st_mode & 0o7777 == 0o600
        assert journal.compact()
        assert path.stat().st_mode & 0o7777 == 0o600
        assert [file.name for file in tmp_path.iterdir()] == ["journal"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (HEAD[:-4] + b"\x01\0\0\0", "it is of version 1, and this program reads version 3"),
        (b"SQLite format 3\0" + bytes(100), "SQLite format 3"),
        (bytes(100), "does not begin as a journal"),
        (b"x", "does not begin as a journal"),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(JournalError, match=problem) as raised:
        ReplyJournal.open(path)
    assert raised.value.path == path
    assert str(path) in str(raised.value)
    assert path.read_bytes() == content
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(JournalError, match="not a regular file"):
        ReplyJournal.open(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        ReplyJournal.open(tmp_path / "link")
    assert not (tmp_path / "target").exists()


def test_a_cut_tail_is_logged_with_figures(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    content = filled(path)
    path.write_bytes(content[:-5])
    record = (len(content) - len(HEAD)) // 3
    with capture_logs() as logs, ReplyJournal.open(path) as journal:
        assert len(journal) == 2
        assert journal.statistics().cut_bytes == record - 5
    (line,) = logs
    assert line["log_level"] == "warning"
    assert (line["path"], line["replies"]) == (str(path), 2)
    assert (line["kept_bytes"], line["cut_bytes"]) == (len(content) - record, record - 5)
    assert f"claims {record - 12} bytes, {record - 17} are left" in line["problem"]


def test_a_flipped_byte_ends_the_reading_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    content = bytearray(filled(path))
    record = (len(content) - len(HEAD)) // 3
    content[-record - 1] ^= 1  # in the second of three
    path.write_bytes(content)
    with capture_logs() as logs, ReplyJournal.open(path) as journal:
        assert len(journal) == 1
    assert "digest" in logs[0]["problem"]
    assert (logs[0]["kept_bytes"], logs[0]["cut_bytes"]) == (len(HEAD) + record, 2 * record)
    assert path.read_bytes() == bytes(content[: len(HEAD) + record])


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [4, "a", 1, 1],
        [1, "a", 1, 1],
        [1, b"a", 1, 1, b"r"],
        [1, "a", 1, 1, "r"],
        [1, "a", 1.0, 1, b""],
        {"a": 1},
        7,
    ],
)
def test_a_record_that_is_none_ends_the_reading(tmp_path: Path, fields: object) -> None:
    path = tmp_path / "journal"
    content = filled(path)
    body = msgpack.packb(fields)
    path.write_bytes(content + struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body)
    with ReplyJournal.open(path) as journal:
        assert len(journal) == 3
    assert path.read_bytes() == content


@given(
    tail=st.binary(max_size=200),
    bodies=st.lists(st.binary(max_size=40), max_size=3),
    zeros=st.integers(0, 9000),
)
def test_rubbish_is_never_an_error(tail: bytes, bodies: list[bytes], zeros: int) -> None:
    records = [struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body for body in bodies]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        content = filled(path)
        path.write_bytes(content + b"".join(records) + tail + bytes(zeros))
        with ReplyJournal.open(path) as journal:
            assert [journal.get(("a", 1, seq)) for seq in range(3)] == [b"reply 0", b"reply 1", b"reply 2"]


def test_what_a_killed_compaction_left_is_removed(tmp_path: Path) -> None:
    content = filled(tmp_path / "journal")
    (tmp_path / "journal.new").write_bytes(content[:-9])
    with ReplyJournal.open(tmp_path / "journal") as journal:
        assert len(journal) == 3
        assert not (tmp_path / "journal.new").exists()
