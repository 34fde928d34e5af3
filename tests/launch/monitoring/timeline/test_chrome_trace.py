"""The file for Perfetto and Chrome, by the rules of its format."""

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.actors.spans import Span
from flexmarl.launch.errors import NoSpans
from flexmarl.launch.monitoring.timeline.chrome_trace import write_trace
from flexmarl.launch.run_folder.run_directory import RunDirectory

from .test_timeline import T, flow, generate, write

WHOLE = (None, None)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "")


def events_of(run: RunDirectory, steps: tuple[int | None, int | None] = WHOLE) -> list[dict[str, Any]]:
    file = run.path / "trace.json"
    write_trace(run, file, steps)
    return check(json.loads(file.read_text()))


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, by the rules of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU:
    each event has what its phase needs, threads belong to processes with names, spans of a thread do not overlap, and
    a flow leaves one span and enters another."""
    events: list[dict[str, Any]] = trace["traceEvents"]
    names = {(e["name"], e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    slices = defaultdict(list)
    flows = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            assert event["args"]["name"]
            continue
        assert ("process_name", event["pid"], None) in names
        assert ("thread_name", event["pid"], event["tid"]) in names
        assert event["ts"] >= 0 and event["name"]
        match event["ph"]:
            case "X":
                assert event["dur"] > 0
                slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] == "t"
            case "s" | "f":
                flows[event["id"]].append(event)
            case other:
                pytest.fail(f"unknown phase {other}")
    for of_thread in slices.values():
        of_thread.sort()
        for (_, end), (begin, _) in pairwise(of_thread):
            assert begin >= end - 0.002, "times are rounded to nanoseconds"
    for leaves, enters in flows.values():
        assert (leaves["ph"], enters["ph"], enters["bp"]) == ("s", "f", "e") and leaves["name"] == enters[
            "name"
        ]
        for event in (leaves, enters):
            around = slices[event["pid"], event["tid"]]
            assert any(begin - 0.002 <= event["ts"] <= end for begin, end in around), "it is bound to a span"
    return events


def test_flows_lead_from_a_trajectory_to_the_installs(run: RunDirectory) -> None:
    write(run, *flow(1), *flow(2))
    events = events_of(run)
    assert Counter(event["name"] for event in events if event["ph"] == "s") == {
        "trajectory to turn": 8,
        "turn to wait": 8,
        "turn to generate": 8,
        "turn to sample": 8,
        "lease to micro_batch": 4,
        "sample to micro_batch": 8,
        "micro_batch to optimizer": 4,
        "optimizer to step": 2,
        "optimizer to publish": 2,
        "publish to versions": 2,
        "publish to install": 4,
    }


def test_a_span_has_its_attributes_and_a_lane_with_overlaps_several_threads(run: RunDirectory) -> None:
    write(
        run,
        generate(0, 10, 0),
        generate(1, 10, 1),
        generate(10.5, 5, 2),
        Span("router", "move", T + 3, T + 3, policy="shared", note="solver-0 goes to other: idle"),
    )
    events = events_of(run)
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(e["ph"], threads[e["tid"]], e["ts"], e.get("dur")) for e in events if e["ph"] in "Xi"]
    assert spans == [
        ("X", "solver-0", 0.0, 10e6),
        ("X", "solver-0 (2)", 1e6, 10e6),
        ("i", "router", 3e6, None),
        ("X", "solver-0", 10.5e6, 5e6),
    ]
    [first, *_] = [e for e in events if e["ph"] == "X"]
    assert first["args"] == {"query": "q1", "policy": "shared", "turn": 0} and first["cat"] == "generate"
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "host instance",
        "host router",
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.3)), min_size=1, max_size=40))
def test_spans_of_any_times_keep_the_rules(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[float, float]]
) -> None:
    run = RunDirectory.create(tmp_path_factory.mktemp("times") / "run", "")
    write(run, *(generate(begin, seconds, n) for n, (begin, seconds) in enumerate(times)))
    assert sum(event["ph"] == "X" for event in events_of(run)) == len(times)


def test_steps_choose_their_time(run: RunDirectory) -> None:
    write(run, *flow(1), *flow(2), *flow(3))

    def steps(*bounds: int | None) -> set[int]:
        first, last = bounds
        return {
            e["args"]["step"] for e in events_of(run, (first, last)) if e["ph"] == "X" and e["cat"] == "step"
        }

    assert (steps(2, 2), steps(2, None), steps(None, 2)) == ({2}, {2, 3}, {1, 2})
    with pytest.raises(NoSpans, match="step 7 are not recorded; those of steps 1 to 3 are"):
        steps(2, 7)


def test_the_name_decides_about_compression(run: RunDirectory) -> None:
    write(run, *flow(1))
    assert write_trace(run, run.path / "t.json.gz", WHOLE) == write_trace(run, run.path / "t.json", WHOLE)
    assert gzip.decompress((run.path / "t.json.gz").read_bytes()) == (run.path / "t.json").read_bytes()


def test_a_run_without_spans_is_refused_and_the_key_named(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(NoSpans, match="trace.enabled=true"):
        write_trace(run, tmp_path / "t.json", WHOLE)
    write(run, generate(0, 1))
    with pytest.raises(NoSpans, match="those of no step are"):
        write_trace(run, tmp_path / "t.json", (1, None))
    assert not (tmp_path / "t.json").exists()
