"""The folder of a simulated run is that of any run: spans have virtual time, and all readers of spans work on it."""

import json
from pathlib import Path

import pytest

from flexmarl.actors.spans import Span
from flexmarl.launch.monitoring.page.panels import PANELS
from flexmarl.launch.monitoring.page.plain import plain
from flexmarl.launch.monitoring.page.recorded_run import RecordedRun
from flexmarl.launch.monitoring.timeline.chrome_trace import write_trace
from flexmarl.launch.monitoring.timeline.stored_spans import StoredSpans
from flexmarl.launch.monitoring.timeline.timeline import timeline
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.run_findings import run_findings
from flexmarl.launch.run_folder.stored_run import read_run
from flexmarl.launch.simulate.scenario import read_scenario
from flexmarl.launch.simulate.scenario_run import run_scenario

SCENARIO = Path(__file__).with_name("scenario.yaml")
STEPS = 7


def simulated(folder: Path, *settings: str) -> RunDirectory:
    run_scenario(read_scenario(SCENARIO, (f"training.steps={STEPS}", *settings)), folder)
    return RunDirectory(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return simulated(tmp_path_factory.mktemp("simulated") / "run")


def spans_of(run: RunDirectory) -> list[Span]:
    stored = StoredSpans(run.trace)
    assert stored.refresh() and not stored.dropped
    return stored.spans(range(stored.size))


def test_spans_have_virtual_time(run: RunDirectory) -> None:
    """Each kind of work takes the time that the devices of the scenario need, and a step that of its figures."""
    spans = spans_of(run)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = {span.step: span for span in spans if span.kind == "step"}
    for line in lines:
        span = steps[line["step"]]
        assert span.end == pytest.approx(line["time_s"], abs=0.01), "seconds since the begin of the run"
    assert {
        "turn",
        "prefill",
        "decode",
        "environment",
        "trajectory",
        "sample",
        "micro_batch",
        "optimizer",
        "install",
    } <= {span.kind for span in spans}
    end_s = lines[-1]["time_s"] + 60
    assert all(0 <= span.begin <= span.end < end_s for span in spans)
    instances = [span.end - span.begin for span in spans if span.kind == "decode"]
    assert min(instances) > 0 and len({*instances}) > 10, "answers have lengths of their own"


def test_the_same_seed_has_the_same_spans_byte_by_byte(run: RunDirectory, tmp_path: Path) -> None:
    def content(of: RunDirectory) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in of.trace.iterdir()}

    assert content(simulated(tmp_path / "again")) == content(run)
    assert content(simulated(tmp_path / "other", "seed=4")) != content(run)


def test_it_begins_and_ends_as_any_run_in_virtual_time(run: RunDirectory) -> None:
    first, *later = [json.loads(line) for line in run.events.read_text().splitlines()]
    [last] = [line for line in later if line["event"] in ("run_started", "run_resumed", "run_ended")]
    assert (first["event"], first["time"], first["step"], first["pid"]) == ("run_started", 0.0, 0, 0)
    assert first["folder"] == str(run.path) and first["cpus"] == 8
    assert last["event"] == "run_ended" and last["wall_s"] == pytest.approx(last["time"], abs=0.01)
    stored = read_run(run.path)
    assert stored.wall_s == last["wall_s"] and stored.step == STEPS
    assert 0 <= stored.age_s < 86400, "of its folder: virtual time begins at 0"
    shown = RecordedRun(run.path)
    shown.refresh()
    panels = {panel.name: plain(panel.view(shown, {})) for panel in PANELS if not panel.reads_samples}
    assert panels["now"]["began"] == 0.0
    assert "run_started" in {kind for _, _, kind, _ in panels["timeline"]["marks"]}


def test_without_a_trace_there_are_none(tmp_path: Path) -> None:
    assert not simulated(tmp_path / "run", "trace.enabled=false", "training.steps=1").trace.exists()


def test_the_trace_the_page_and_the_reasons_for_slowness_work_on_it(
    run: RunDirectory, tmp_path: Path
) -> None:
    assert write_trace(run, tmp_path / "trace.json", (2, 3)) > 100
    view = timeline(run.path).view()
    assert {lane["role"] for lane in view["lanes"]} >= {
        "rollout",
        "instance",
        "slot",
        "store",
        "orchestrator",
    }
    assert view["run_begin"] == 0.0 and view["spans"]
    shown = RecordedRun(run.path)
    shown.refresh()
    # Engines of random letters record no trajectories.
    panels = {panel.name: plain(panel.view(shown, {})) for panel in PANELS if not panel.reads_samples}
    json.dumps(panels, allow_nan=False)
    assert panels["now"]["state"] == "done" and panels["now"]["step"] == STEPS
    assert read_run(run.path).state == "done"
    causes = {finding.cause for finding in run_findings(run, shown.config)}
    assert "slow environment" in causes, (
        "its workload waits half a second after each call, and a second for a reward"
    )
