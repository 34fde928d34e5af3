"""The files of spans: names before records, a torn end, a limit, a disk that is full."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.actors.spans import Span, record
from flexmarl.core.spans import SpanBatch, SpanRecorder
from flexmarl.launch.monitoring.timeline.stored_spans import StoredSpans
from flexmarl.launch.run_folder.spans.span_log import DAMAGED, RECORD, SpanLog, names_file, spans_file
from flexmarl.launch.run_folder.spans.trace_config import TraceConfig

from ....core.span_batches import timeless_recorder


def batch(*spans: Span, recorder: SpanRecorder | None = None) -> SpanBatch:
    recorder = recorder or timeless_recorder()
    for span in spans:
        record(recorder, *span)
    return recorder.take(1.0, 0)


def stored(folder: Path) -> list[Span]:
    spans = StoredSpans(folder)
    spans.refresh()
    return spans.spans(range(spans.size))


def open_log(folder: Path, warnings: list[str] | None = None, **config: object) -> SpanLog:
    warn: Callable[[str], None] = ([] if warnings is None else warnings).append
    return SpanLog(folder, TraceConfig.model_validate(config), warn)


STEP = Span("orchestrator", "step", 1.0, 2.0, step=1)
TURN = Span("rollout-0 turns", "turn", 1.0, 1.5, "q\n1", "solver", "shared", trajectory=0, turn=1)


def test_spans_of_several_processes_share_one_table_of_names(tmp_path: Path) -> None:
    log = open_log(tmp_path / "trace")
    log.add("orchestrator", "here", batch(STEP))
    log.add("rollout-0", "there", batch(TURN, TURN))
    log.add("rollout-0", "there", batch())
    log.close()
    assert stored(tmp_path / "trace") == [STEP, TURN, TURN]
    spans = StoredSpans(tmp_path / "trace")
    spans.refresh()
    assert spans.lanes == [("orchestrator", "orchestrator", "here"), ("rollout-0 turns", "rollout", "there")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut_spans=st.integers(0, 3 * RECORD.itemsize), cut_names=st.integers(0, 60))
def test_a_torn_end_costs_at_most_what_was_cut_off_and_the_next_life_continues_behind_it(
    tmp_path_factory: pytest.TempPathFactory, cut_spans: int, cut_names: int
) -> None:
    folder = tmp_path_factory.mktemp("torn") / "trace"
    log = open_log(folder)
    log.add("orchestrator", "here", batch(STEP, STEP))
    log.add("rollout-0", "here", batch(TURN))
    log.close()
    for file, cut in ((spans_file(folder), cut_spans), (names_file(folder), cut_names)):
        file.write_bytes(file.read_bytes()[: -cut or None])
    before = stored(folder)
    kept = 3 - -(-cut_spans // RECORD.itemsize)
    assert len(before) == kept
    again = open_log(folder)
    again.add("rollout-0", "here", batch(TURN, STEP))
    again.close()
    after = stored(folder)
    assert after[-2:] == [TURN, STEP]
    assert len(after) == kept + 2
    for span, whole in zip(after[:-2], (STEP, STEP, TURN), strict=False):
        assert span.kind in (whole.kind, DAMAGED), "no new name takes the place of a lost one"


def test_the_share_falls_as_the_files_fill_up_and_nothing_is_written_beyond_the_limit(tmp_path: Path) -> None:
    log = open_log(tmp_path / "trace", limit_mib=1, sample=0.5)
    shares = [log.share]
    while log.share:
        log.add("rollout-0", "here", batch(*[TURN] * 1000))
        if log.share != shares[-1]:
            shares.append(log.share)
    log.add("rollout-0", "here", batch(TURN))
    log.close()
    assert shares[:4] == [0.5, 0.25, 0.125, 0.0625] and shares[-1] == 0.0
    assert 2**20 <= spans_file(tmp_path / "trace").stat().st_size < 2**20 + 64_000
    assert open_log(tmp_path / "off", enabled=False).share == 0.0


def test_spans_that_a_process_dropped_are_counted_over_its_lives_and_those_of_the_run(tmp_path: Path) -> None:
    def lost(count: int) -> SpanBatch:
        recorder = timeless_recorder()
        recorder.dropped = count
        return recorder.take(1.0, 0)

    log = open_log(tmp_path / "trace")
    for count in (3, 5, 2):  # it was started again after the second
        log.add("rollout-0", "here", lost(count))
    log.close()
    again = open_log(tmp_path / "trace")
    again.add("rollout-0", "here", lost(1))
    again.close()
    spans = StoredSpans(tmp_path / "trace")
    spans.refresh()
    assert spans.dropped == again.dropped == 8


def test_a_full_disk_costs_spans_and_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    log = open_log(tmp_path / "trace", warnings)
    log.add("orchestrator", "here", batch(STEP))

    real, room = os.write, [20]

    def write(file: int, data: memoryview) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return real(file, data[: room.pop()])

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", write)
        log.add("rollout-0", "here", batch(TURN, TURN))
        log.add("rollout-0", "here", batch(TURN))
    log.add("rollout-0", "here", batch(TURN))
    log.close()
    assert log.dropped == 3 and len(warnings) == 1 and "No space left" in warnings[0]
    assert stored(tmp_path / "trace") == [STEP, TURN], "the part of a line was cut off"


def test_a_table_with_a_damaged_line_keeps_the_entries_behind_it(tmp_path: Path) -> None:
    log = open_log(tmp_path / "trace")
    log.add("orchestrator", "here", batch(STEP, TURN))
    log.close()
    names = names_file(tmp_path / "trace")
    names.write_bytes(names.read_bytes().replace(b'"orchestrator"', b'"orchestra\xff\xff\x00', 1))
    again = open_log(tmp_path / "trace")
    again.add("rollout-0", "here", batch(TURN, STEP))
    again.close()
    first, second, third, fourth = stored(tmp_path / "trace")
    assert first.lane == "?" and [second, third, fourth] == [TURN, TURN, STEP]


def test_spans_that_come_after_the_limit_are_counted(tmp_path: Path) -> None:
    log = open_log(tmp_path / "trace", limit_mib=1)
    many = batch(*[TURN] * 20_000)
    log.add("rollout-0", "there", many)
    assert log.share == 0.0
    log.add("rollout-1", "there", batch(TURN, TURN))
    log.add("rollout-1", "there", batch())
    assert log.dropped == 2
    log.close()
    spans = StoredSpans(tmp_path / "trace")
    spans.refresh()
    assert (spans.size, spans.dropped) == (20_000, 2)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_folder_that_begins_again_is_read_from_its_begin(tmp_path: Path, count: int) -> None:
    log = open_log(tmp_path / "trace")
    log.add("rollout-0", "there", batch(TURN, TURN))
    log.close()
    spans = StoredSpans(tmp_path / "trace")
    assert spans.refresh() and spans.size == 2
    spans_file(tmp_path / "trace").unlink()
    names_file(tmp_path / "trace").unlink()
    log = open_log(tmp_path / "trace")
    log.add("orchestrator", "here", batch(*[STEP] * count))
    log.close()
    assert spans.refresh()
    assert spans.spans(range(spans.size)) == [STEP] * count and [lane.name for lane in spans.lanes] == [
        "orchestrator"
    ]
