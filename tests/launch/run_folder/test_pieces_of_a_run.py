"""Wall times and evaluations of a run in pieces."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexmarl.actors.names import Step
from flexmarl.actors.run_events import Evaluated, RunEnded, RunEvent, RunResumed, RunStarted
from flexmarl.launch.run_folder.json_lines import event_to_json
from flexmarl.launch.run_folder.run_history import History, load_history

MACHINE: Any = ("3.11", "linux", 2, 1)


def history(folder: Path, events: Sequence[tuple[float, RunEvent]], steps: int = 0) -> History:
    lines = [event_to_json(event) | {"time": at_s} for at_s, event in events]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [
        {"step": step, "time_s": step, "step_s": 1, "rollout_s": 1, "tokens": 1, "tokens_per_s": 1}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return load_history(folder)


def started(step: int = 0) -> RunEvent:
    return RunResumed(Step(step), *MACHINE) if step else RunStarted(Step(0), *MACHINE)


def evaluated(step: int, accuracy: float) -> RunEvent:
    return Evaluated(Step(step), 0.5, {"accuracy": accuracy})


def test_the_wall_time_is_the_one_that_the_console_shows(tmp_path: Path) -> None:
    read = history(tmp_path, [(100.0, started()), (122.2, RunEnded(False, Step(9), wall_s=22.134))], steps=9)
    assert read.wall_s == 22.134


def test_a_killed_process_counts_up_to_its_last_event_and_pauses_do_not_count(tmp_path: Path) -> None:
    events = [
        (100.0, started()),
        (110.0, evaluated(0, 0.1)),  # killed after this
        (500.0, started(3)),
        (507.5, RunEnded(True, Step(5), wall_s=7.25)),
        (900.0, started(5)),
        (904.0, evaluated(6, 0.1)),  # still running
    ]
    assert history(tmp_path, events).wall_s == 10 + 7.25 + 4
    assert history(tmp_path, [], steps=7).wall_s == 7


def test_evaluations_of_lost_steps_are_left_out(tmp_path: Path) -> None:
    events = [
        (1.0, started()),
        (2.0, evaluated(0, 0.1)),
        (3.0, evaluated(10, 0.5)),
        (4.0, evaluated(20, 0.9)),
        (5.0, started(12)),
        (6.0, RunEnded(True, Step(15), wall_s=1.0)),
    ]
    assert history(tmp_path, events).evaluated("accuracy") == [(0, 0.1), (10, 0.5)]
    again = [*events, (7.0, started()), (8.0, evaluated(0, 0.2))]
    assert history(tmp_path, again).evaluated("accuracy") == [(0, 0.2)]
