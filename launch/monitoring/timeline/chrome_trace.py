"""All spans of a run in the format of Chrome's traces, which Perfetto (https://ui.perfetto.dev) opens too.

    process    a node and a part of the run, such as its instances
    thread     a lane; one in which spans overlap has several, each without overlaps, as the format demands
    X          a span, with its attributes as ``args``
    i          a moment: a move of an instance
    s, f       a flow from a span to one that it leads to (``links.py``)

Times are microseconds since the run's first span. The file is written span by span; in memory are the times.
"""

import gzip
import heapq
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np

from ....actors.spans import Span
from ....core.durable.files import draft_of
from ...errors import NoSpans
from ...run_folder.run_directory import RunDirectory
from .labels import label_of
from .links import RELATIONS, SLACK_S
from .stored_spans import BLOCK, Array, StoredSpans

_TOLERANCE_S: Final = 1e-3
"""Two computations of a slot overlap by less: their times are of a clock that counts milliseconds."""
_LEAST_S: Final = 1e-6
_NESTED: Final = "wait"
"""Lies within another span of its lane, and has a thread beside it."""
_MOMENT: Final = "move"


class _Thread(NamedTuple):
    """``beside``: of spans within others of the lane. ``number``: among those of the lane."""

    lane: int
    beside: bool
    number: int


class _Chosen(NamedTuple):
    """Spans in the order of their begins. ``thread``: of each, as a place in ``threads``."""

    ids: Array
    begin: Array
    end: Array
    thread: Array
    threads: list[_Thread]


def write_trace(directory: RunDirectory, file: Path, steps: tuple[int | None, int | None]) -> int:
    """Writes the spans of a run to a file, compressed if its name ends with ``.gz``, and returns their number.
    ``steps``: the first and the last one; None: from the run's begin, to its end. Raises NoSpans, OSError."""
    stored = StoredSpans(directory.trace)
    if not stored.refresh():
        raise NoSpans(
            f"{directory.path} has no spans: they are recorded with trace.enabled=true, while the run runs"
        )
    window = _window(stored, directory, steps)
    with draft_of(file) as draft, _open_text(draft, compressed=file.suffix == ".gz") as out:
        return _write(out, stored, _choose(stored, window))


def _open_text(path: Path, *, compressed: bool) -> IO[str]:
    return (
        gzip.open(path, "wt", compresslevel=5, encoding="utf-8")
        if compressed
        else path.open("w", encoding="utf-8")
    )


def _window(
    stored: StoredSpans, directory: RunDirectory, steps: tuple[int | None, int | None]
) -> tuple[float, float]:
    """The seconds of the steps. Raises NoSpans if one of them was not recorded."""
    if steps == (None, None):
        return -np.inf, np.inf
    times: dict[int, tuple[float, float]] = {}
    entry = stored.entry_of("step")
    for _, records in stored.records():
        for record in records[records["kind"] == entry] if entry is not None else ():
            begin, end = times.get(int(record["step"]), (np.inf, -np.inf))
            times[int(record["step"])] = min(begin, float(record["begin"])), max(end, float(record["end"]))
    for step in steps:
        if step is not None and step not in times:
            present = f"those of steps {min(times)} to {max(times)} are" if times else "those of no step are"
            raise NoSpans(f"{directory.path}: the spans of step {step} are not recorded; {present}")
    first, last = steps
    return -np.inf if first is None else times[first][0], np.inf if last is None else times[last][1]


def _choose(stored: StoredSpans, window: tuple[float, float]) -> _Chosen:
    begin_s, end_s = window
    parts = []
    for number, block in enumerate(stored.blocks):
        places = np.flatnonzero(block.is_whole & (block.begin <= end_s) & (block.end >= begin_s))
        parts.append((number * BLOCK + places, block.begin[places], block.end[places], block.row[places]))
    ids, begin, end, row = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((-end, begin))
    begin, end = begin[order], end[order]
    end = np.maximum(end, begin + _LEAST_S)
    return _Chosen(ids[order], begin, end, *_divide(stored, row[order], begin, end))


def _divide(stored: StoredSpans, row: Array, begin: Array, end: Array) -> tuple[Array, list[_Thread]]:
    """The thread of each span, so that none overlap: of those of its lane the first that is free. Moves a begin to the
    end before it, if that is later by less than the tolerance."""
    threads: dict[_Thread, int] = {}
    lanes: dict[tuple[int, bool], tuple[list[tuple[float, int]], list[int]]] = {}
    thread = np.zeros(len(row), "<i4")
    for number, (pair, start, stop) in enumerate(
        zip(row.tolist(), begin.tolist(), end.tolist(), strict=True)
    ):
        lane, kind = stored.rows[pair]
        group = lane, stored.kinds[kind] == _NESTED
        running, free = lanes.setdefault(group, ([], []))
        while running and running[0][0] <= start:
            heapq.heappush(free, heapq.heappop(running)[1])
        if not free and running and running[0][0] < min(stop, start + _TOLERANCE_S):
            begin[number], track = heapq.heappop(running)
        else:
            track = heapq.heappop(free) if free else len(running)
        heapq.heappush(running, (stop, track))
        thread[number] = threads.setdefault(_Thread(*group, track), len(threads))
    return thread, [*threads]


# --------------------------------------------------------------------------- writing


def _write(out: IO[str], stored: StoredSpans, chosen: _Chosen) -> int:
    zero_s = float(chosen.begin.min(initial=np.inf))
    processes: dict[tuple[str, str], int] = {}
    for lane in stored.lanes:
        processes.setdefault((lane.node, lane.role), len(processes) + 1)
    pids = [
        processes[stored.lanes[thread.lane].node, stored.lanes[thread.lane].role] for thread in chosen.threads
    ]
    out.write(
        '{"displayTimeUnit": "ms", "otherData": ' + json.dumps({"begin": zero_s}) + ', "traceEvents": ['
    )
    separator = "\n"
    for event in _events(stored, chosen, processes, pids, zero_s):
        out.write(separator + json.dumps(event))
        separator = ",\n"
    out.write("\n]}\n")
    return len(chosen.ids)


def _events(
    stored: StoredSpans,
    chosen: _Chosen,
    processes: Mapping[tuple[str, str], int],
    pids: list[int],
    zero_s: float,
) -> Iterator[dict[str, Any]]:
    for (node, role), pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{node} {role}".strip()}}
    for tid, (thread, pid) in enumerate(zip(chosen.threads, pids, strict=True)):
        name = stored.lanes[thread.lane].name + (" waits" if thread.beside else "")
        name += f" ({thread.number + 1})" if thread.number else ""
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    for first in range(0, len(chosen.ids), BLOCK):
        part = slice(first, first + BLOCK)
        spans = stored.spans(chosen.ids[part].tolist())
        times = zip(
            chosen.begin[part].tolist(), chosen.end[part].tolist(), chosen.thread[part].tolist(), strict=True
        )
        for span, (begin, end, tid) in zip(spans, times, strict=True):
            yield _event_of(span, begin - zero_s, end - begin) | {"pid": pids[tid], "tid": tid}
    yield from _flows(stored, chosen, pids, zero_s)


def _event_of(span: Span, begin_s: float, seconds: float) -> dict[str, Any]:
    args = {
        name: value
        for name, value in span._asdict().items()
        if name not in ("lane", "kind", "begin", "end") and value not in ("", -1)
    }
    event = {"name": label_of(span), "cat": span.kind, "ts": _microseconds(begin_s), "args": args}
    if span.kind == _MOMENT:
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": _microseconds(seconds)}


def _flows(stored: StoredSpans, chosen: _Chosen, pids: list[int], zero_s: float) -> Iterator[dict[str, Any]]:
    """One flow for each pair of spans that a relation links."""
    number = 0
    for relation in RELATIONS:
        before, of_before = _keys(stored, chosen, relation.before, relation.by, relation.steps)
        after, of_after = _keys(stored, chosen, relation.after, relation.by, 0)
        order = np.argsort(of_before, kind="stable")
        before, of_before = before[order], of_before[order]
        lows, highs = (np.searchsorted(of_before, of_after, side) for side in ("left", "right"))
        for target, low, high in zip(after.tolist(), lows.tolist(), highs.tolist(), strict=True):
            for source in before[low:high].tolist():
                if relation.overlap and not _overlap(chosen, source, target):
                    continue
                number += 1
                leave_s = _within(chosen, source, float(chosen.begin[target]))
                for phase, place, at_s in (
                    ("s", source, leave_s),
                    ("f", target, _within(chosen, target, leave_s)),
                ):
                    tid = int(chosen.thread[place])
                    flow = {
                        "ph": phase,
                        "id": number,
                        "name": f"{relation.before} to {relation.after}",
                        "cat": "flow",
                    }
                    flow |= {"ts": _microseconds(at_s - zero_s), "pid": pids[tid], "tid": tid}
                    yield flow | {"bp": "e"} if phase == "f" else flow


def _overlap(chosen: _Chosen, source: int, target: int) -> bool:
    begin, end = chosen.begin, chosen.end
    return bool(begin[source] <= end[target] + SLACK_S and begin[target] <= end[source] + SLACK_S)


def _within(chosen: _Chosen, place: int, at_s: float) -> float:
    """The moment in a span that is the nearest to ``at_s``: a flow begins and ends within its spans."""
    begin, end = float(chosen.begin[place]), float(chosen.end[place])
    return min(max(at_s, begin), end - min(_LEAST_S, (end - begin) / 2))


def _keys(
    stored: StoredSpans, chosen: _Chosen, kind: str, by: tuple[str, ...], steps: int
) -> tuple[Array, Array]:
    """The chosen spans of a kind, by their places, and the key of each."""
    entry = stored.entry_of(kind)
    place_of = np.full(stored.size, -1, "<i4")
    place_of[chosen.ids] = np.arange(len(chosen.ids))
    places, keys = [np.empty(0, "<i4")], [np.empty(0, "<u8")]
    for first, records in stored.records() if entry is not None else ():
        present = place_of[first : first + len(records)]
        is_chosen = (records["kind"] == entry) & (present >= 0)
        places.append(present[is_chosen])
        keys.append(stored.keys(first + np.flatnonzero(is_chosen), records[is_chosen], by, steps))
    return np.concatenate(places), np.concatenate(keys)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
