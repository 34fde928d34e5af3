"""The display for programs."""

import io
import json
from typing import Any

from flexmarl.actors.names import AgentName, Step
from flexmarl.actors.run_events import Evaluated, TrajectoryFailed
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.monitoring.console.json_display import JsonDisplay
from flexmarl.launch.run_folder.json_lines import metrics_from_json


def shown(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_each_step_event_phase_and_warning_is_an_object_on_a_line() -> None:
    out = io.StringIO()
    metrics = StepMetrics(
        Step(3), 1.0, 0.5, 0.25, 10, 20.0, by_agent={AgentName("a"): {"reward": float("nan")}}
    )
    with JsonDisplay(out) as display:
        display.phase("starting actors", 1, 5)
        display.phase("starting actors", 1, 5)
        display.phase("starting actors", 2, 5)
        display.event(Evaluated(Step(0), 1.5, {"accuracy": 0.5}))
        display.step(metrics)
        display.warn("the disk\nis full", at_once=True)
        display.event(TrajectoryFailed(Step(3), "3:q_0", "ValueError: no", "frames"))
        display.tick()
    lines = shown(out)
    assert all(line["time"] > 0 for line in lines)
    assert [line["event"] for line in lines] == [
        "phase", "phase", "evaluated", "step", "warning", "trajectory_failed",
    ]  # fmt: skip
    assert (lines[1]["text"], lines[1]["done"], lines[1]["total"]) == ("starting actors", 2, 5)
    assert lines[2]["accuracy"] == 0.5 and lines[4]["text"] == "the disk\nis full"
    assert lines[3]["step"] == 3 and lines[3]["reward/a"] is None
    assert lines[5]["traceback"] == "frames"
    assert metrics_from_json(lines[3]) is not None


def test_its_wall_time_stops_at_its_end() -> None:
    now = [5.0]
    with JsonDisplay(io.StringIO(), lambda: now[0]) as display:
        now[0] = 7.0
        assert display.wall_s == 2.0
    now[0] = 100.0
    assert display.wall_s == 2.0
