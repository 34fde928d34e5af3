"""The changes between two versions, computed by several threads."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexmarl.transport.host_memory.block import CHUNK_BYTES, Block
from flexmarl.transport.remote import deltas
from flexmarl.transport.remote.deltas import Deltas

from ...patience import PATIENCE_S

_CHUNKS = 6


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[tuple[Block, Block]]:
    """Two versions, of which the second has one more in every chunk."""
    old, new = (Block.create(tmp_path, f"{name}.arena", _CHUNKS * CHUNK_BYTES) for name in ("old", "new"))
    for chunk in range(_CHUNKS):
        new.payload[chunk * CHUNK_BYTES + chunk] = 1
    yield old, new
    old.close()
    new.close()


def test_each_chunk_is_computed_once_however_many_threads_want_it(
    blocks: tuple[Block, Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: Counter[int] = Counter()
    starting = threading.Barrier(4)
    encode = deltas.encode

    def counted(old: memoryview, new: memoryview) -> bytes | None:
        computed[bytes(new[:_CHUNKS]).index(1)] += 1
        return encode(old, new)

    monkeypatch.setattr(deltas, "encode", counted)
    size = _CHUNKS * CHUNK_BYTES
    pair = Deltas(*blocks, size)

    def writer() -> None:
        starting.wait(PATIENCE_S)
        for start in range(0, size, CHUNK_BYTES):
            pair.compute(start)

    def reader() -> bytes | None:
        starting.wait(PATIENCE_S)
        return pair.of(0, size)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work) for work in (writer, writer)]
        found = [job.result(PATIENCE_S) for job in [pool.submit(reader), pool.submit(reader)]]
        for job in jobs:
            job.result(PATIENCE_S)
    assert computed == dict.fromkeys(range(_CHUNKS), 1)
    changes = found[0]
    assert changes is not None and changes == found[1]
    target = bytearray(size)
    read = 0
    for start in range(0, size, CHUNK_BYTES):
        read += deltas.apply(memoryview(changes)[read:], memoryview(target)[start : start + CHUNK_BYTES])
    assert target == blocks[1].payload


def test_an_error_reaches_all_that_wait_and_the_next_reader_tries_again(
    blocks: tuple[Block, Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fails(old: memoryview, new: memoryview) -> bytes | None:
        begun.set()
        may_end.wait(PATIENCE_S)
        raise MemoryError("no room")

    pair = Deltas(*blocks, CHUNK_BYTES)
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(deltas, "encode", fails)
        first = pool.submit(pair.of, 0, CHUNK_BYTES)
        assert begun.wait(PATIENCE_S)
        second = pool.submit(pair.of, 0, CHUNK_BYTES)
        may_end.set()
        for job in (first, second):
            with pytest.raises(MemoryError, match="no room"):
                job.result(PATIENCE_S)
    assert pair.of(0, CHUNK_BYTES) is not None


def test_there_are_no_changes_from_a_version_that_is_written_over(blocks: tuple[Block, Block]) -> None:
    pair = Deltas(*blocks, 2 * CHUNK_BYTES)
    changes = pair.of(0, CHUNK_BYTES)
    assert changes is not None
    assert blocks[0].begin(2, CHUNK_BYTES)
    assert pair.of(0, CHUNK_BYTES) == changes, "computed before"
    assert pair.of(CHUNK_BYTES, 2 * CHUNK_BYTES) is None
    assert not Deltas(*blocks, CHUNK_BYTES).has_old, "it is being written"
