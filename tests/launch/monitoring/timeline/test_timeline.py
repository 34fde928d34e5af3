"""Views of a timeline: what is drawn at which zoom, and a span with its links in both directions."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexmarl.actors.spans import NAMES, Span, record
from flexmarl.launch.errors import RunDirectoryError
from flexmarl.launch.monitoring.timeline.stored_spans import StoredSpans
from flexmarl.launch.monitoring.timeline.timeline import Timeline, timeline
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.spans.span_log import RECORD, SpanLog, spans_file
from flexmarl.launch.run_folder.spans.trace_config import TraceConfig

from ....core.span_batches import timeless_recorder

T = 1_790_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "")


def write(run: RunDirectory, *spans: Span, dropped: int = 0) -> None:
    recorder = timeless_recorder()
    for span in spans:
        record(recorder, *span)
    recorder.dropped = dropped
    log = SpanLog(run.trace, TraceConfig(), print)
    log.add("process", "host", recorder.take(1.0, 0))
    log.close()


def generate(begin: float, seconds: float, turn: int = 0) -> Span:
    return Span("solver-0", "generate", T + begin, T + begin + seconds, "q1", policy="shared", turn=turn)


def test_wide_spans_are_listed_and_narrow_ones_are_merged_by_lane(run: RunDirectory) -> None:
    write(
        run,
        generate(0, 50),
        *(generate(50 + n * 0.1, 0.05) for n in range(100)),
        Span("router", "move", T + 30, T + 30, note="a move"),
        Span("solver-1", "install", T + 60, T + 100, policy="shared", version=2),
        dropped=4,
    )
    view = timeline(run.path).view(T, T + 100, 100)
    json.dumps(view, allow_nan=False)
    kinds = view["kinds"]
    assert [lane["name"] for lane in view["lanes"]] == ["solver-0", "router", "solver-1"]
    assert view["lanes"][0] == {"name": "solver-0", "role": "instance", "node": "host"}
    assert [(lane, kinds[kind], id_, label) for lane, _, _, kind, id_, label in view["spans"]] == [
        (0, "generate", 0, "shared · q1 turn 0"), (1, "move", 101, "a move"), (2, "install", 102, "shared v2"),
    ]  # fmt: skip
    assert [(lane, kinds[kind]) for lane, *_, kind, _ in view["dense"]] == [(0, "generate")] * len(
        view["dense"]
    )
    busy = sum((end - begin) * share for _, begin, end, _, share in view["dense"])
    assert busy == pytest.approx(5.0, rel=0.01), "the time of the narrow spans"
    assert view["dropped"] == 4 and (view["run_begin"], view["run_end"]) == (T, T + 100)


def test_the_prompts_of_an_instance_are_drawn_above_the_turns_that_it_decodes(run: RunDirectory) -> None:
    def span(kind: str, begin: float, end: float, turn: int) -> Span:
        return Span("solver-0", kind, T + begin, T + end, "q1", policy="shared", turn=turn)

    write(
        run,
        span("prefill", 20, 22, 1), span("decode", 22, 40, 1),
        span("prefill", 0, 5, 0), span("decode", 5, 60, 0),
    )  # fmt: skip
    view = timeline(run.path).view(T, T + 100, 100)
    drawn = [(view["kinds"][kind], number) for _, _, _, kind, number, _ in view["spans"]]
    assert drawn == [("decode", 1), ("decode", 3), ("prefill", 0), ("prefill", 2)]


def test_a_window_has_the_spans_that_reach_into_it(run: RunDirectory) -> None:
    write(run, generate(0, 10, 0), generate(9, 3, 1), generate(20, 5, 2))
    view = timeline(run.path).view(T + 10, T + 20, 10)
    assert [id_ for *_, id_, _ in view["spans"]] == [0, 1], "the third begins where it ends"


def test_the_answer_is_bounded_at_any_zoom(run: RunDirectory) -> None:
    rng = np.random.default_rng(0)
    begins, seconds = rng.uniform(0, 1000, 3000), rng.exponential(20, 3000)
    write(
        run,
        *(
            generate(float(begin), float(s), n)
            for n, (begin, s) in enumerate(zip(begins, seconds, strict=True))
        ),
    )
    shown = timeline(run.path)
    for window in (1000.0, 100.0, 1.0):
        for width in (50, 200):
            view = shown.view(T, T + window, width)
            assert len(view["spans"]) <= width and len(view["dense"]) <= width
            if len(view["spans"]) == width:
                assert view["dense"], "those that are not listed are merged"


def test_it_follows_a_run_that_adds_spans_and_events(run: RunDirectory) -> None:
    shown = timeline(run.path)
    empty = shown.view()
    assert (empty["spans"], empty["dense"], empty["lanes"], empty["marks"]) == ([], [], [], [])
    write(run, generate(0, 10))
    assert shown.refresh() and not shown.refresh()
    assert len(shown.view()["spans"]) == 1
    write(run, Span("solver-1", "install", T + 4, T + 5, policy="shared"))
    event = {"time": T + 2, "event": "actor_restarted", "actor": "solver-1", "reason": "it was killed"}
    run.events.write_text(json.dumps(event) + "\n" + '{"time": 1, "eve')
    view = shown.view()
    assert len(view["spans"]) == 2 and [lane["name"] for lane in view["lanes"]] == ["solver-0", "solver-1"]
    assert view["marks"] == [[1, T + 2, "actor_restarted", "solver-1 is restarted: it was killed"]]


def test_marks_of_a_run_that_began_again_are_those_of_its_new_file(run: RunDirectory) -> None:
    write(run, generate(0, 10))

    def saved(*steps: int) -> None:
        lines = [
            {"time": T + step, "event": "checkpoint_saved", "step": step, "folder": str(step)}
            for step in steps
        ]
        run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))

    shown = timeline(run.path)
    for steps in ((1, 2, 3), (4,), (5, 6, 7)):
        saved(*steps)
        assert [mark[1] - T for mark in shown.view()["marks"]] == [*steps]


def test_many_marks_in_a_pixel_are_one(run: RunDirectory) -> None:
    write(run, generate(0, 100))
    lines = [
        {"time": T + n, "event": "checkpoint_saved", "step": n, "folder": f"step_{n}"} for n in range(100)
    ]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    marks = timeline(run.path).view(T, T + 100, 10)["marks"]
    assert len(marks) == 10 and marks[0][3] == "checkpoint saved: step_0 (and 9 more)"


def test_records_that_are_damaged_are_shown_nowhere(run: RunDirectory) -> None:
    write(run, generate(0, 1), generate(1, 1), generate(2, 1))
    records = np.fromfile(spans_file(run.trace), RECORD)
    records[1]["begin"], records[1]["end"] = 0.0, 0.0
    bad = np.zeros(2, RECORD)
    bad["begin"], bad["end"] = np.nan, 5.0
    for name in NAMES:
        bad[name] = 10**9
    spans_file(run.trace).write_bytes(records.tobytes() + bad.tobytes() + b"a torn record")
    shown = timeline(run.path)
    view = shown.view()
    assert [id_ for *_, id_, _ in view["spans"]] == [0, 2]
    assert view["run_begin"] == T
    with pytest.raises(KeyError):
        shown.span(1)


@pytest.mark.parametrize("window", [(T, T), (T + 1, T), (float("nan"), T), (T, float("inf"))])
def test_a_window_without_a_length_is_refused(run: RunDirectory, window: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="a window of time"):
        timeline(run.path).view(*window)


@pytest.mark.parametrize("width", [0, -1, 10_001])
def test_a_width_out_of_bounds_is_refused(run: RunDirectory, width: int) -> None:
    with pytest.raises(ValueError, match="the width is 1 to 10000"):
        timeline(run.path).view(T, T + 1, width)


def test_a_step_is_found_as_it_ran_last(run: RunDirectory) -> None:
    with pytest.raises(KeyError):
        timeline(run.path).step(1)
    steps = [
        Span("orchestrator", "step", T + at, T + at + 2, step=step) for at, step in ((0, 1), (3, 2), (9, 2))
    ]
    write(run, generate(0, 1), *steps)
    assert timeline(run.path).step(2) == {"begin": T + 9, "end": T + 11, "steps": [1, 2]}
    with pytest.raises(KeyError):
        timeline(run.path).step(3)


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError):
        timeline(tmp_path)


# --------------------------------------------------------------------------- links


def flow(step: int) -> list[Span]:
    """Two trajectories of two turns each, in two micro-batches, and the optimizer step that they lead to."""
    policy = "shared"
    at, version = T + step * 100, step - 1
    spans = []
    for number in range(2):
        of: dict[str, Any] = {"query": "q1", "step": step, "trajectory": number}
        spans.append(Span("rollout-0 trajectories", "trajectory", at, at + 9, **of))
        for turn in range(2):
            begin, batch = at + 4 * turn, step * 10 + turn
            of |= {"turn": turn, "policy": policy, "version": version}
            spans.append(Span("rollout-0 turns", "turn", begin, begin + 4, **of))
            spans.append(Span("rollout-0 turns", "wait", begin, begin + 1, **of))
            spans.append(Span("shared-0", "generate", begin + 1, begin + 4, **of))
            spans.append(
                Span("trainer samples", "sample", at + 20 + turn, at + 21 + turn, micro_batch=batch, **of)
            )
    for turn in range(2):
        begin, batch = at + 20 + turn, step * 10 + turn
        of_batch: dict[str, Any] = {"policy": policy, "version": version, "micro_batch": batch}
        spans.append(Span("store", "lease", begin - 1, begin, **of_batch))
        spans.append(Span("trainer", "micro_batch", begin, begin + 1, **of_batch))
    spans += [
        Span("trainer", "optimizer", at + 30, at + 31, policy=policy, version=step, step=step),
        Span("orchestrator", "step", at, at + 31, step=step),
        Span("trainer", "publish", at + 31, at + 32, policy=policy, version=step),
        Span("router", "versions", at + 32, at + 40, policy=policy, version=step),
        *(Span(f"shared-{n}", "install", at + 33, at + 34, policy=policy, version=step) for n in range(2)),
    ]
    return spans


def linked(shown: Timeline, kind: str, step: int, turn: int = -1) -> Counter[tuple[str, str]]:
    view = shown.view(T + step * 100, T + step * 100 + 99, 1000)
    kinds = view["kinds"]
    ids = [id_ for _, _, _, k, id_, _ in view["spans"] if kinds[k] == kind]
    span = next(span for span in map(shown.span, ids) if turn < 0 or span["attributes"].get("turn") == turn)
    assert all(link["id"] != span["id"] and link["begin"] <= link["end"] for link in span["links"])
    return Counter((link["relation"], kinds[link["kind"]]) for link in span["links"])


def test_a_turn_leads_to_its_sample_micro_batch_step_and_installs(run: RunDirectory) -> None:
    write(run, *flow(1), *flow(2))
    assert linked(timeline(run.path), "turn", 1, turn=1) == {
        ("before", "trajectory"): 1,
        ("after", "wait"): 1,
        ("after", "generate"): 1,
        ("after", "sample"): 1,
        ("after", "micro_batch"): 1,
        ("after", "optimizer"): 1,
        ("after", "step"): 1,
        ("after", "publish"): 1,
        ("after", "versions"): 1,
        ("after", "install"): 2,
    }


def test_steps_that_a_resumed_run_repeats_are_linked_within_one_life(run: RunDirectory) -> None:
    write(run, *flow(1))
    once = linked(timeline(run.path), "turn", 1)
    write(run, *flow(1))
    shown = timeline(run.path)
    assert linked(shown, "turn", 1) == once
    for number in range(2 * len(flow(1))):
        is_second = number >= len(flow(1))
        assert all((link["id"] >= len(flow(1))) == is_second for link in shown.span(number)["links"])


def test_an_install_is_led_to_by_all_that_its_version_was_trained_on(run: RunDirectory) -> None:
    write(run, *flow(1), *flow(2))
    assert linked(timeline(run.path), "install", 2) == {
        ("before", "publish"): 1,
        ("before", "optimizer"): 1,
        ("before", "micro_batch"): 2,
        ("before", "lease"): 2,
        ("before", "sample"): 4,
        ("before", "turn"): 4,
        ("before", "trajectory"): 2,
    }


def test_a_span_has_its_attributes_and_no_others(run: RunDirectory) -> None:
    write(run, *flow(3))
    shown = timeline(run.path)
    view = shown.view()
    number = next(id_ for _, _, _, k, id_, _ in view["spans"] if view["kinds"][k] == "optimizer")
    span = shown.span(number)
    json.dumps(span, allow_nan=False)
    assert span["attributes"] == {"policy": "shared", "version": 3, "step": 3}
    assert view["kinds"][span["kind"]] == "optimizer" and view["lanes"][span["lane"]]["name"] == "trainer"
    with pytest.raises(KeyError):
        shown.span(10_000)


def test_the_links_of_a_span_are_bounded_and_the_nearest(run: RunDirectory) -> None:
    far = [
        Span("trainer samples", "sample", T + n, T + n + 1, f"q{n}", policy="shared", micro_batch=5, step=1)
        for n in range(1000)
    ]
    write(run, *far, Span("trainer", "micro_batch", T + 900, T + 901, policy="shared", micro_batch=5))
    links = timeline(run.path).span(1000)["links"]
    assert len(links) == 300 and min(link["begin"] for link in links) > T + 600


def test_links_of_another_span_are_found_without_another_look_at_the_file(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [span for step in range(1, 60) for span in flow(step)]
    write(run, *steps)
    shown = timeline(run.path)
    first = shown.span(5)
    read: list[int] = []
    read_records = StoredSpans._read

    def count(stored: StoredSpans, first: int, size: int) -> Any:
        read.append(size)
        return read_records(stored, first, size)

    monkeypatch.setattr(StoredSpans, "_read", count)
    assert shown.span(5) == first and shown.span(len(steps) // 2)["links"]
    assert not read
    write(run, *flow(70))
    assert {link["relation"] for link in shown.span(len(steps) + 5)["links"]} == {"before", "after"}
    assert shown.span(5) == first
