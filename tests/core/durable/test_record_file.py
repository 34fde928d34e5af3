"""The file of a journal: its records, damage, foreign files, and its replacement."""

import os
import struct
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.durable.record_file import Head, RecordFile, chunks, frame, read_records
from flexmarl.core.errors import JournalError

HEAD = Head(b"flexmarl letters", version=3)
BODIES = [b"first", b"second", b"third"]


def opened(path: Path, accepts: bytes | None = None) -> tuple[RecordFile, list[bytes]]:
    """The file, and the bodies that were read. ``accepts``: the only valid body; None: all are."""
    bodies: list[bytes] = []

    def read(body: bytes) -> bool:
        if accepts is not None and body != accepts:
            return False
        bodies.append(body)
        return True

    return RecordFile.open(path, HEAD, read), bodies


def filled(path: Path) -> bytes:
    file, _ = opened(path)
    with closing(file):
        file.append(b"".join(map(frame, BODIES)))
    return path.read_bytes()


def test_records_come_back_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    content = filled(path)
    assert content == HEAD.content + b"".join(
        struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body for body in BODIES
    )
    assert path.stat().st_mode & 0o7777 == 0o600
    file, bodies = opened(path)
    with closing(file):
        assert bodies == BODIES and file.size_bytes == len(content)
    assert read_records(path, HEAD, lambda body: body in BODIES).problem == ""


def test_a_replacement_takes_the_place_of_the_file_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    filled(path)
    file, _ = opened(path)
    with closing(file):
        replacement = file.begin_replacement()
        replacement.append(frame(b"new"))
        file.replace_by(replacement)
        file.append(frame(b"newer"))
        replacement.discard()
    assert path.stat().st_mode & 0o7777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]
    file, bodies = opened(path)
    file.close()
    assert bodies == [b"new", b"newer"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (HEAD.content[:-4] + b"\x01\0\0\0", "it is of version 1, and this program reads version 3"),
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
        opened(path)
    assert raised.value.path == path
    assert str(path) in str(raised.value)
    assert path.read_bytes() == content
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(JournalError, match="not a regular file"):
        opened(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        opened(tmp_path / "link")
    assert not (tmp_path / "target").exists()


def test_a_tail_is_cut_with_figures(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    content = filled(path)
    record = len(frame(BODIES[-1]))
    path.write_bytes(content[:-3])
    file, bodies = opened(path)
    file.close()
    assert bodies == BODIES[:2]
    assert (file.cut.kept_bytes, file.cut.cut_bytes) == (len(content) - record, record - 3)
    assert file.cut.problem == "a record claims 5 bytes, 2 are left"
    assert path.read_bytes() == content[:-record]


def test_a_flipped_byte_ends_the_reading_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    content = bytearray(filled(path))
    content[-len(frame(BODIES[-1])) - 1] ^= 1  # in the second of three
    path.write_bytes(content)
    file, bodies = opened(path)
    file.close()
    assert bodies == BODIES[:1] and "digest" in file.cut.problem
    assert path.read_bytes() == bytes(content[: len(HEAD.content) + len(frame(BODIES[0]))])


def test_a_record_that_the_reader_refuses_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    filled(path)
    file, bodies = opened(path, accepts=BODIES[0])
    file.close()
    assert bodies == BODIES[:1] and "invalid in this version" in file.cut.problem
    assert path.read_bytes() == HEAD.content + frame(BODIES[0])


@given(tail=st.binary(max_size=200), zeros=st.integers(0, 9000))
def test_rubbish_is_never_an_error(tail: bytes, zeros: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        path.write_bytes(filled(path) + tail + bytes(zeros))
        file, bodies = opened(path)
        file.close()
        assert bodies[: len(BODIES)] == BODIES


def test_what_a_killed_replacement_left_is_removed(tmp_path: Path) -> None:
    content = filled(tmp_path / "journal")
    (tmp_path / "journal.new").write_bytes(content[:-9])
    file, bodies = opened(tmp_path / "journal")
    file.close()
    assert bodies == BODIES
    assert not (tmp_path / "journal.new").exists()


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(1, 50))
def test_chunks_are_all_records_in_order(records: list[bytes], chunk_bytes: int) -> None:
    joined = list(chunks(records, chunk_bytes))
    assert b"".join(joined) == b"".join(records)
    assert all(len(chunk) >= chunk_bytes for chunk in joined[:-1])
