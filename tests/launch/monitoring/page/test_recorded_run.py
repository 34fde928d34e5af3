"""A run's folder as the page reads it: while it grows, after a resume, torn, of another version."""

import shutil
from pathlib import Path
from typing import Any

from flexmarl.actors.names import PolicyName, Step
from flexmarl.actors.run_events import Evaluated, PolicySuspended, RunEnded, RunResumed
from flexmarl.launch.monitoring.page.recorded_run import RecordedRun
from flexmarl.launch.run_folder.json_lines import event_to_json

from ...run_folder.records import record
from .folders import ENDED, STARTED, folder_of, lines_of, step_line


def steps_of(run: RecordedRun, key: str = "step_s") -> list[int]:
    with run.reading():
        return list(run.curves[key].steps)


def test_what_was_added_is_read_and_raises_the_revision(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [record(1)])
    run = RecordedRun(folder)
    assert steps_of(run) == [1]
    before = run.refresh()
    assert run.refresh() == before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(lines_of([record(2)]) + '{"step": 3, "ti')
    assert run.refresh() > before and steps_of(run) == [1, 2] and run.unreadable == 0
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('me_s": 1.0, "step_s": 4.0}\n')
    assert steps_of(run) == [1, 2, 3]
    states = [run.state]
    with (folder / "events.jsonl").open("a") as file:
        file.write(lines_of([ENDED]))
    run.refresh()
    assert [*states, run.state] == ["killed", "done"]


def test_findings_of_a_run_that_runs_are_kept_for_a_while(tmp_path: Path) -> None:
    slow = [
        record(step, ["a"]) | {"step_s": 1.0, "rollout_s": 0.2, "backward_s/a": 0.7} for step in range(1, 9)
    ]
    folder = folder_of(tmp_path, slow[:4])
    run = RecordedRun(folder)
    states = []
    with run.directory.locked():
        run.refresh()
        states.append(run.state)
        assert run.findings == []
        with run.directory.metrics.open("a") as file:
            file.write(lines_of(slow[4:]))
        run.refresh()
        assert run.findings == []
    run.refresh()
    assert [*states, run.state] == ["running", "killed"] and run.findings[0].cause == "late training"


def test_a_resume_replaces_the_steps_that_were_lost(tmp_path: Path) -> None:
    evaluated = [event_to_json(Evaluated(Step(step), 1.0, {"accuracy": 0.1 * step})) for step in (0, 2, 4)]
    resumed = event_to_json(RunResumed(Step(2), "3.12", "linux", 2, 18))
    lines = [record(1), record(2), record(3), record(4), record(3, time_s=0.1)]
    run = RecordedRun(folder_of(tmp_path, lines, [STARTED, *evaluated, resumed]))
    assert steps_of(run) == [1, 2, 3] and run.resumes == [3]
    assert list(run.evaluations) == [0, 2]
    assert run.curves["eval/accuracy"].thinned(9) == {"steps": [0, 2], "mean": [0, 0.2]}


def test_a_file_that_a_resume_made_anew_is_read_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [record(step) for step in range(1, 6)])
    run = RecordedRun(folder)
    assert steps_of(run) == [1, 2, 3, 4, 5]
    (folder / "other").write_text(lines_of([record(1), record(2)]))
    (folder / "other").replace(folder / "metrics.jsonl")
    assert steps_of(run) == [1, 2]


def test_evaluations_of_steps_and_of_events_are_one_curve(tmp_path: Path) -> None:
    first = event_to_json(Evaluated(Step(0), 1.0, {"accuracy": 0.1}))
    run = RecordedRun(
        folder_of(tmp_path, [record(1), step_line(2, {"eval/accuracy": 0.5})], [STARTED, first])
    )
    assert steps_of(run, "eval/accuracy") == [0, 2]


def test_torn_and_strange_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    strange: list[dict[str, Any]] = [{"step": "x"}, {"step": -1}, {"step": 10**30}, {"no": "step"}]
    folder = folder_of(tmp_path, [record(1), *strange])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n[1]\n" + b"[" * 100_000 + b"\n\n")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "of a later version", "time": "yesterday"}\nnull\n')
    run = RecordedRun(folder)
    assert steps_of(run) == [1]
    assert run.unreadable == len(strange) + 4
    assert [logged.event is None for logged in run.events] == [False, True]


def test_a_folder_that_is_removed_leaves_an_empty_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", [record(1)])
    run = RecordedRun(folder)
    assert steps_of(run) == [1]
    shutil.rmtree(folder)
    assert steps_of(run) == [] and run.state == "not started"


def test_long_texts_are_cut_and_copies_do_not_crowd_out_events(tmp_path: Path) -> None:
    failed = event_to_json(RunEnded(False, error="x" * 100_000))
    copy = event_to_json(PolicySuspended(PolicyName("a"), "slot-0", "no work", 10, 0.1, "shm"))
    run = RecordedRun(folder_of(tmp_path, [], [STARTED, *[copy] * 50, failed]))
    run.refresh()
    assert run.ended is not None and run.ended.error is not None
    assert len(run.ended.error) < 21_000 and "100000 characters" in run.ended.error
    assert len(run.events) == 2 and len(run.copies) == 50


def test_the_config_of_a_resumed_run_is_read_again(tmp_path: Path) -> None:
    run = RecordedRun(folder_of(tmp_path, [record(1)]))
    first = run.refresh()
    assert run.config["training.steps"] == 9
    (tmp_path / "config.yaml").write_text("training: {steps: 12}\n")
    assert run.refresh() > first and run.config["training.steps"] == 12
    (tmp_path / "config.yaml").write_text("training: {steps: 12")
    run.refresh()
    assert run.config["training.steps"] == 12, "one that can't be read leaves the last one"


def test_a_file_that_begins_again_with_the_inode_of_the_old_one_is_read_again(tmp_path: Path) -> None:
    run = RecordedRun(folder_of(tmp_path, [record(1), record(2)]))
    run.refresh()
    path, size = tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").stat().st_size
    path.write_text(lines_of([record(step, tokens=7) for step in (1, 2, 3)]))
    assert path.stat().st_size > size
    run.refresh()
    assert list(run.curves["tokens"].values) == [7, 7, 7]
