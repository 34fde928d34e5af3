"""Segments: written bytes are read in place, and no others."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from flexmarl.actors.segments.errors import SegmentFull
from flexmarl.actors.segments.reader import SegmentReader
from flexmarl.actors.segments.segments import (
    ByteRef,
    Medium,
    SegmentDirectories,
    SegmentGrant,
    create,
    remove,
)
from flexmarl.actors.segments.writer import ALIGNMENT, SegmentWriter, packed_bytes
from flexmarl.core.errors import UnsafeDirectory
from flexmarl.transport.errors import ForeignHandle

SIZE = 2**16


@pytest.fixture
def directories(tmp_path: Path) -> SegmentDirectories:
    directories = SegmentDirectories(tmp_path / "memory", tmp_path / "disk")
    directories.memory.mkdir(0o700)
    directories.disk.mkdir(0o700)
    return directories


@pytest.fixture
def writer(directories: SegmentDirectories) -> Iterator[SegmentWriter]:
    writer = SegmentWriter(directories)
    yield writer
    writer.close()


def granted(
    directories: SegmentDirectories, size_bytes: int = SIZE, medium: Medium = Medium.MEMORY
) -> SegmentGrant:
    return SegmentGrant(create(directories, medium, size_bytes), size_bytes)


arrays = hypothesis_numpy.arrays(
    st.sampled_from([np.int32, np.float32, np.float64, np.uint8, np.bool_, np.int64]),
    hypothesis_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)
contents = st.lists(st.one_of(arrays, st.binary(max_size=200), arrays.map(np.transpose)), max_size=20)


@given(batches=st.lists(contents, max_size=4), piece_bytes=st.integers(1, 500), taken=st.integers(1, 3))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Any]], piece_bytes: int, taken: int
) -> None:
    root = tmp_path_factory.mktemp("segments")
    directories = SegmentDirectories(root / "memory", root / "memory")
    directories.memory.mkdir(0o700)
    writer, reader = SegmentWriter(directories), SegmentReader(directories)
    writer.use(granted(directories, 2**17))
    with (
        mock.patch("flexmarl.actors.segments.writer._IOV_MAX", taken),
        # A kernel that never writes all at once.
        mock.patch("os.pwritev", lambda fd, some, at: os.pwrite(fd, b"".join(some)[:taken], at)),
    ):
        refs = [writer.write(batch) for batch in batches]
    for batch, found in zip(batches, refs, strict=True):
        assert len(found) == len(batch)
        plain = [item.tobytes() if isinstance(item, np.ndarray) else item for item in batch]
        assert [bytes(view) for view in reader.views(found)] == plain
        for item, ref in zip(batch, found, strict=True):
            assert ref.offset % ALIGNMENT == 0
            if isinstance(item, np.ndarray):
                (array,) = reader.arrays([ref], item.dtype)
                assert array.dtype == item.dtype and not array.flags.writeable
                np.testing.assert_array_equal(array.reshape(item.shape), item)
        pieces = list(reader.read_chunks(found, piece_bytes))
        assert b"".join(pieces) == b"".join(plain)
        assert all(len(piece) == piece_bytes for piece in pieces[:-1])
        assert all(pieces)
    writer.close()
    reader.close()


def test_a_batch_that_does_not_fit_finishes_its_segment(
    directories: SegmentDirectories, writer: SegmentWriter
) -> None:
    batch = [np.zeros(1000, np.uint8)] * 20
    with pytest.raises(SegmentFull) as none_yet:
        writer.write(batch)
    assert none_yet.value.needed_bytes == packed_bytes(batch) <= SIZE
    first, second = granted(directories), granted(directories)
    writer.use(first)
    unanswered = [writer.write(batch) for _ in range(3)]
    with pytest.raises(SegmentFull) as full:
        writer.write(batch)
    assert full.value.left_bytes == SIZE - 3 * 20 * 1024
    assert writer.take_finished() == [], "three puts are on their way"
    writer.use(second)
    writer.answered(writer.write(batch))
    for refs in unanswered:
        assert writer.take_finished() == []
        writer.answered(refs)
    assert writer.take_finished() == [first.segment]
    assert writer.take_finished() == []
    assert writer.write(batch)[0].segment == second.segment


def test_a_segment_that_its_owner_does_not_know_is_dropped(
    directories: SegmentDirectories, writer: SegmentWriter
) -> None:
    writer.use(granted(directories))
    refs = writer.write([b"content"])
    writer.drop(refs[0].segment)
    writer.drop(refs[0].segment)
    writer.answered(refs)
    with pytest.raises(SegmentFull):
        writer.write([b"content"])
    assert writer.take_finished() == []


def test_nothing_is_written_where_an_array_is_refused(
    directories: SegmentDirectories, writer: SegmentWriter
) -> None:
    writer.use(granted(directories))
    wrong: Any = [np.array([object()]), "text", 7]
    for content in wrong:
        with pytest.raises(TypeError):
            writer.write([b"before", content])
    (ref,) = writer.write([b"after"])
    assert ref == ByteRef(ref.segment, 0, 5)
    assert writer.write([]) == []


def test_views_outlive_the_segment_and_the_mapping_does_not(
    directories: SegmentDirectories, writer: SegmentWriter
) -> None:
    reader = SegmentReader(directories)
    writer.use(granted(directories))
    refs = writer.write([np.arange(10, dtype=np.int32)])
    (array,) = reader.arrays(refs, np.int32)
    chunks = reader.read_chunks(refs, 7)
    remove(directories, refs[0].segment)
    remove(directories, refs[0].segment)
    assert reader.views(refs)[0] == array.view(np.uint8).data, "it is mapped still"
    reader.forget_removed()
    with pytest.raises(ForeignHandle, match="can't be opened"):
        reader.views(refs)
    assert array.tolist() == list(range(10))
    assert b"".join(chunks) == array.tobytes()


def test_mapping_another_segment_lets_go_of_removed_ones(
    directories: SegmentDirectories, writer: SegmentWriter
) -> None:
    reader = SegmentReader(directories)
    for medium in (Medium.MEMORY, Medium.DISK) * 3:
        writer.use(granted(directories, medium=medium))
        refs = writer.write([b"content"])
        assert bytes(reader.views(refs)[0]) == b"content"
        remove(directories, refs[0].segment)
        assert len(reader._mapped) == 1
    reader.close()


@pytest.mark.parametrize(
    ("offset", "size_bytes"), [(-1, 1), (0, -1), (0, SIZE + 1), (SIZE, 1), (SIZE + 1, 0), (2**70, 2**70)]
)
def test_a_reference_beyond_its_segment_is_refused(
    directories: SegmentDirectories, offset: int, size_bytes: int
) -> None:
    refs = [ByteRef(granted(directories).segment, offset, size_bytes)]
    reader = SegmentReader(directories)
    with pytest.raises(ForeignHandle):
        reader.views(refs)
    with pytest.raises(ForeignHandle):
        reader.arrays(refs, np.uint8)
    with pytest.raises(ForeignHandle):
        reader.read_chunks(refs, 10)


def test_the_ends_of_a_segment_can_be_read(directories: SegmentDirectories) -> None:
    name, reader = granted(directories).segment, SegmentReader(directories)
    refs = [ByteRef(name, 0, 0), ByteRef(name, SIZE, 0), ByteRef(name, SIZE - 1, 1), ByteRef(name, 0, SIZE)]
    assert [len(view) for view in reader.views(refs)] == [0, 0, 1, SIZE]
    assert [len(array) for array in reader.arrays(refs, np.uint8)] == [0, 0, 1, SIZE]
    with pytest.raises(ValueError, match="whole number"):
        reader.arrays([ByteRef(name, 0, 6)], np.int32)
    with pytest.raises(ValueError, match="chunks of 0 bytes"):
        reader.read_chunks(refs, 0)


OTHER = "0" * 32


@pytest.mark.parametrize(
    "name",
    [
        "",
        "m",
        "../secret",
        "/etc/passwd",
        f"x-{OTHER}",
        f"m-{OTHER}/",
        f"m-{OTHER}\n",
        f"m-{'A' * 32}",
        "m-\0",
    ],
)
def test_only_names_of_segments_are_opened(
    directories: SegmentDirectories, writer: SegmentWriter, name: str
) -> None:
    with mock.patch("os.open", side_effect=AssertionError("opened")):
        with pytest.raises(ForeignHandle, match="invalid segment name"):
            SegmentReader(directories).views([ByteRef(name, 0, 1)])
        with pytest.raises(ForeignHandle, match="invalid segment name"):
            writer.use(SegmentGrant(name, SIZE))


def test_only_files_of_segments_are_opened(
    directories: SegmentDirectories, writer: SegmentWriter, tmp_path: Path
) -> None:
    name = f"m-{OTHER}"
    path = directories.path(name)
    (tmp_path / "secret").write_bytes(bytes(SIZE))
    for kind in ("link", "fifo", "folder", "empty"):
        match kind:
            case "link":
                path.symlink_to(tmp_path / "secret")
            case "fifo":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "empty":
                path.touch()
        with pytest.raises(ForeignHandle):
            SegmentReader(directories).views([ByteRef(name, 0, 1)])
        with pytest.raises(ForeignHandle):
            writer.use(SegmentGrant(name, SIZE))
        path.rmdir() if kind == "folder" else path.unlink()
    with pytest.raises(ForeignHandle, match=f"it has {SIZE} bytes, not {SIZE + 1}"):
        writer.use(SegmentGrant(granted(directories).segment, SIZE + 1))


def test_segments_are_private(directories: SegmentDirectories) -> None:
    path = directories.path(granted(directories).segment)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert path.stat().st_blocks * 512 >= SIZE, "its space is taken"
    directories.disk.chmod(0o750)
    with pytest.raises(UnsafeDirectory, match="0750"):
        SegmentReader(directories)
    with pytest.raises(UnsafeDirectory, match="0750"):
        SegmentWriter(directories)


def test_no_room_leaves_no_file(directories: SegmentDirectories) -> None:
    with (
        mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device")),
        pytest.raises(OSError, match="No space"),
    ):
        create(directories, Medium.MEMORY, SIZE)
    assert list(directories.memory.iterdir()) == []
