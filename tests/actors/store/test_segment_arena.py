"""The arena's accounts against a model, its limits, full disks, and processes that are killed."""

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from structlog.testing import capture_logs

from flexmarl.actors.errors import ProtocolViolation, StoreError, StoreFull
from flexmarl.actors.segments.errors import SegmentFull
from flexmarl.actors.segments.reader import SegmentReader
from flexmarl.actors.segments.segments import ByteRef, SegmentDirectories
from flexmarl.actors.segments.writer import SegmentWriter
from flexmarl.actors.store.segment_arena import ArenaLimits, SegmentArena
from flexmarl.core.errors import UnsafeDirectory

from ...full_disk import room_for

SOURCES = Path(__file__).parents[3] / "scripts" / "src"
SEGMENT = 2**14
LIMITS = ArenaLimits(
    segment_bytes=SEGMENT, memory_bytes=3 * SEGMENT, disk_bytes=3 * SEGMENT, disk_free_bytes=0
)


def places_in(folder: Path) -> SegmentDirectories:
    return SegmentDirectories(folder / "memory", folder / "disk")


def files(places: SegmentDirectories) -> set[str]:
    return {path.name for folder in (places.memory, places.disk) for path in folder.iterdir()}


class Row:
    """A row's references, and the contents that they must lead to."""

    def __init__(self, refs: list[ByteRef], contents: list[bytes]) -> None:
        self.refs = refs
        self.contents = contents


class Use(RuleBasedStateMachine):
    """Writers that come, write, put, seal and die, rows that come and go, a store that is killed at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.places = places_in(Path(self.folder.name))
        self.arena = SegmentArena(self.places, LIMITS)
        self.writers = {name: SegmentWriter(self.places) for name in ("rollout/0", "rollout/1")}
        self.unput: list[tuple[str, Row]] = []
        self.rows: list[Row] = []
        self.granted: dict[str, str] = {}
        self.sizes: dict[str, int] = {}

    def teardown(self) -> None:
        for writer in self.writers.values():
            writer.close()
        self.arena.close()
        self.folder.cleanup()

    @rule(
        name=st.sampled_from(["rollout/0", "rollout/1"]),
        sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 9000)), min_size=1, max_size=4),
        fill=st.integers(0, 255),
    )
    def write(self, name: str, sizes: list[int], fill: int) -> None:
        contents = [bytes([fill]) * size for size in sizes]
        writer = self.writers[name]
        try:
            refs = writer.write(contents)
        except SegmentFull as full:
            finished = writer.take_finished()
            self.arena.seal(name, finished)
            for segment in finished:
                del self.granted[segment]
            try:
                grant = self.arena.grant(name, full.needed_bytes)
            except StoreFull:
                larger = max(SEGMENT, -(-full.needed_bytes // 4096) * 4096)
                for place in "md":
                    assert self.used(place) + larger > 3 * SEGMENT
                return
            self.granted[grant.segment] = name
            self.sizes[grant.segment] = grant.size_bytes
            writer.use(grant)
            refs = writer.write(contents)
        self.unput.append((name, Row(refs, contents)))

    def used(self, place: str) -> int:
        names = [name for name in files(self.places) if name.startswith(place)]
        return sum(self.sizes[name] for name in names)

    @precondition(lambda self: self.unput)
    @rule(data=st.data(), accepted=st.booleans())
    def put(self, data: st.DataObject, accepted: bool) -> None:
        name, row = self.unput.pop(data.draw(st.integers(0, len(self.unput) - 1)))
        other = "rollout/1" if name == "rollout/0" else "rollout/0"
        with pytest.raises(StoreError, match=f"not a segment that {other} may write to"):
            self.arena.check(other, row.refs)
        self.arena.check(name, row.refs)
        if accepted:
            self.arena.hold(row.refs)
            self.rows.append(row)
        self.writers[name].answered(row.refs)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.arena.hold(row.refs)
        self.rows.append(Row(row.refs, row.contents))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        row = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.arena.release(row.refs)

    @rule(name=st.sampled_from(["rollout/0", "rollout/1"]))
    def writer_dies(self, name: str) -> None:
        had = {segment for segment, owner in self.granted.items() if owner == name}
        self.arena.seal(name, had)
        self.granted = {segment: owner for segment, owner in self.granted.items() if owner != name}
        for other, row in self.unput:
            if other == name:
                with pytest.raises(StoreError, match="ask for another"):
                    self.arena.check(name, row.refs)
        self.unput = [(other, row) for other, row in self.unput if other != name]
        self.writers[name].close()
        self.writers[name] = SegmentWriter(self.places)

    @rule()
    def store_is_killed(self) -> None:
        """Writers keep the segments that they have; a segment that the journal does not know is removed."""
        self.arena.close()
        self.arena = SegmentArena(self.places, LIMITS)
        (self.places.disk / ("d-" + "0" * 32)).write_bytes(b"granted, and not in the journal")
        assert self.arena.recover(self.granted, [ref for row in self.rows for ref in row.refs]) == set()

    @invariant()
    def accounts_are_right(self) -> None:
        live = {ref.segment for row in self.rows for ref in row.refs}
        assert files(self.places) == live | self.granted.keys()
        statistics = self.arena.statistics()
        assert statistics.segments == len(live | self.granted.keys())
        assert statistics.granted == len(self.granted)
        assert (statistics.memory_bytes, statistics.disk_bytes) == (self.used("m"), self.used("d"))
        assert statistics.live_refs == sum(len(row.refs) for row in self.rows)
        assert statistics.live_bytes == sum(len(content) for row in self.rows for content in row.contents)

    @invariant()
    def every_row_can_be_read(self) -> None:
        reader = SegmentReader(self.places)
        for row in self.rows:
            assert [bytes(view) for view in reader.views(row.refs)] == row.contents
            assert b"".join(self.arena.read_chunks(row.refs, 1000)) == b"".join(row.contents)
        reader.close()


TestUse = Use.TestCase
TestUse.settings = settings(max_examples=60, stateful_step_count=40)


# --------------------------------------------------------------------------- limits


def test_segments_are_made_in_memory_then_on_the_disk_then_not(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    arena = SegmentArena(places, LIMITS)
    with capture_logs() as logs:
        names = [arena.grant("a").segment for _ in range(6)]
        assert "".join(name[0] for name in names) == "mmmddd"
        for _ in range(2):
            with pytest.raises(StoreFull, match="49152 of 49152 bytes are used in .*disk") as full:
                arena.grant("a")
        assert full.value.needed_bytes == SEGMENT
        arena.seal("a", names[:1])
        assert arena.grant("a").segment.startswith("m")
    assert [line["event"] for line in logs] == ["store full: writers wait until rows are consumed"]
    with pytest.raises(StoreError, match="may have 49152 in all") as never:
        arena.grant("a", 4 * SEGMENT)
    assert not isinstance(never.value, StoreFull)


def test_a_large_batch_gets_a_segment_of_its_own(tmp_path: Path) -> None:
    arena = SegmentArena(places_in(tmp_path), LIMITS)
    writer = SegmentWriter(arena.directories)
    content = bytes(2 * SEGMENT + 1)
    with pytest.raises(SegmentFull) as full:
        writer.write([content])
    grant = arena.grant("a", full.value.needed_bytes)
    assert 2 * SEGMENT < grant.size_bytes <= 2 * SEGMENT + 8192
    writer.use(grant)
    refs = writer.write([content])
    arena.check("a", refs)
    assert arena.statistics().memory_bytes == grant.size_bytes
    writer.close()


def test_without_room_for_its_files_the_store_is_full(tmp_path: Path) -> None:
    arena = SegmentArena(places_in(tmp_path), LIMITS)
    with (
        room_for(SEGMENT - 1),
        pytest.raises(StoreFull, match="memory: File too large; .*disk: File too large"),
    ):
        arena.grant("a")
    assert files(arena.directories) == set()
    assert arena.statistics().segments == 0
    assert arena.grant("a").segment.startswith("m"), "and again once there is room"


def test_a_full_tmpfs_spills_to_the_disk(tmp_path: Path) -> None:
    arena = SegmentArena(places_in(tmp_path), LIMITS)
    fallocate = os.posix_fallocate

    def full_in_memory(descriptor: int, offset: int, size_bytes: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent.name == "memory":
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, size_bytes)

    with mock.patch("os.posix_fallocate", full_in_memory):
        assert arena.grant("a").segment.startswith("d")
    assert len(files(arena.directories)) == 1


def test_spilling_leaves_room_on_the_disk(tmp_path: Path) -> None:
    limits = ArenaLimits(SEGMENT, memory_bytes=0, disk_bytes=2**62, disk_free_bytes=2**60)
    with pytest.raises(StoreFull, match=f"bytes are free in .*disk, {2**60} are to be left"):
        SegmentArena(places_in(tmp_path), limits).grant("a")


# --------------------------------------------------------------------------- bad references


@pytest.mark.parametrize(
    "spoil",
    [
        lambda name: ByteRef(name, -1, 1),
        lambda name: ByteRef(name, 0, -1),
        lambda name: ByteRef(name, 1, SEGMENT),
        lambda name: ByteRef(name, 2**70, 0),
        lambda name: ByteRef("../" + name, 0, 1),
        lambda name: ByteRef("m-" + "0" * 32, 0, 1),
    ],
)
def test_references_into_nothing_are_refused(tmp_path: Path, spoil: Callable[[str], ByteRef]) -> None:
    arena = SegmentArena(places_in(tmp_path), LIMITS)
    good = ByteRef(arena.grant("a").segment, 0, SEGMENT)
    arena.check("a", [good])
    bad = spoil(good.segment)
    with pytest.raises(StoreError):
        arena.check("a", [good, bad])
    with pytest.raises(StoreError):
        arena.read_chunks([good, bad], 100)


def test_a_sealed_segment_takes_no_more(tmp_path: Path) -> None:
    arena = SegmentArena(places_in(tmp_path), LIMITS)
    ref = ByteRef(arena.grant("a").segment, 0, 10)
    arena.hold([ref])
    arena.seal("b", [ref.segment, "unknown"])
    arena.check("a", [ref])
    arena.release([ref])
    assert files(arena.directories) == {ref.segment}, "it may be written to"
    arena.hold([ref])
    arena.seal("a", [ref.segment])
    arena.seal("a", [ref.segment])
    with pytest.raises(StoreError, match="ask for another"):
        arena.check("a", [ref])
    arena.release([ref])
    assert files(arena.directories) == set()
    with pytest.raises(ProtocolViolation):
        arena.release([ref])


def test_what_was_never_held_is_not_released(tmp_path: Path) -> None:
    arena = SegmentArena(places_in(tmp_path), LIMITS)
    ref = ByteRef(arena.grant("a").segment, 0, 10)
    with pytest.raises(ProtocolViolation):
        arena.release([ref])
    arena.hold([ref])
    with pytest.raises(ProtocolViolation):
        arena.release([ref._replace(size_bytes=11)])
    assert arena.statistics().live_bytes == 10


def test_empty_references_keep_their_segment(tmp_path: Path) -> None:
    arena = SegmentArena(places_in(tmp_path), LIMITS)
    ref = ByteRef(arena.grant("a").segment, 0, 0)
    arena.hold([ref])
    arena.seal("a", [ref.segment])
    assert files(arena.directories) == {ref.segment}
    assert list(arena.read_chunks([ref], 10)) == []
    arena.release([ref])
    assert files(arena.directories) == set()


def test_directories_are_private(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    SegmentArena(places, LIMITS)
    assert {folder.stat().st_mode & 0o7777 for folder in (places.memory, places.disk)} == {0o700}
    places.memory.chmod(0o755)
    with pytest.raises(UnsafeDirectory):
        SegmentArena(places, LIMITS)


# --------------------------------------------------------------------------- processes

_STORE = """
import sys, os
from pathlib import Path
import msgpack, numpy as np
from flexmarl.actors.store.segment_arena import ArenaLimits, SegmentArena, SegmentDirectories
from flexmarl.actors.segments.writer import SegmentWriter
folder = Path(sys.argv[1])
places = SegmentDirectories(folder / "memory", folder / "disk")
arena = SegmentArena(places, ArenaLimits(2**14, 2**14, 2**20, 0))
for number in range(3):
    grant = arena.grant("a")
    writer = SegmentWriter(places)
    writer.use(grant)
    refs = writer.write([np.full(100, number, np.int32), np.full(100, number, np.float32)])
    os.write(1, msgpack.packb(refs))
sys.stdin.read()
"""


def test_bytes_survive_the_processes_that_wrote_them(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    command = [sys.executable, "-c", _STORE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        told: Any = msgpack.Unpacker(child.stdout, read_size=1)
        kept, unknown, spilled = ([ByteRef(*ref) for ref in next(told)] for _ in range(3))
        child.kill()
    assert child.returncode == -9
    assert (kept[0].segment[0], spilled[0].segment[0]) == ("m", "d")
    arena = SegmentArena(places, LIMITS)
    assert arena.recover({spilled[0].segment: "a"}, kept) == set()
    assert files(places) == {kept[0].segment, spilled[0].segment}
    arena.check("a", spilled)
    with pytest.raises(StoreError):
        arena.check("a", unknown)
    ints, floats = (
        b"".join(arena.read_chunks(kept, 2**20))[:400],
        SegmentReader(places).arrays(kept[1:], np.float32),
    )
    assert ints == np.zeros(100, np.int32).tobytes() and floats[0].tolist() == [0.0] * 100
    arena.release(kept)
    assert files(places) == {spilled[0].segment}


def test_segments_that_are_gone_are_returned(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    arena = SegmentArena(places, LIMITS)
    here, gone, short = (ByteRef(arena.grant("a").segment, 0, SEGMENT) for _ in range(3))
    places.path(gone.segment).unlink()
    os.truncate(places.path(short.segment), 10)
    (places.memory / "another file").touch()
    after = SegmentArena(places, LIMITS)
    assert after.recover({gone.segment: "a"}, [here, gone, short]) == {gone.segment, short.segment}
    assert files(places) == {here.segment, "another file"}
    assert after.statistics().live_bytes == SEGMENT
