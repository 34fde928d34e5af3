"""The section of the report with trajectories of evaluations."""

import re
from pathlib import Path

from flexmarl.launch.monitoring.report.report import write_report
from flexmarl.launch.monitoring.report.trajectory_sections import evaluated_trajectories

from ...run_folder.samples.files import record, recorded_run, trajectory

REWARDS = (0.4, 0.1, 0.9, 0.3, 0.7)


def evaluation(step: int, text: str = "4") -> list[bytes]:
    found = []
    for query, reward in enumerate(REWARDS):
        one = trajectory(step, query, 0, reward, evaluation=True, text=f"{text} {reward}")
        found.append(record(one._replace(rewards={"solver": reward})))
    return [*found, record(trajectory(step, 9, 0, evaluation=True, failure="late"))]


def titles(page: str) -> list[str]:
    return re.findall(r"<summary>(.*?)</summary>", page)


def test_best_median_and_worst_of_three_evaluations(tmp_path: Path) -> None:
    records = [one for step in (0, 10, 20, 30, 40) for one in evaluation(step)]
    run = recorded_run(tmp_path / "run", [*records, record(trajectory(41, 1, 0))])
    page = evaluated_trajectories(run.path)
    assert titles(page) == [
        f"{kind}: evaluation after step {step} · query q{query} · trajectory 0 · solver {reward}"
        for step in (0, 20, 40)
        for kind, query, reward in (("best", 2, 0.9), ("median", 0, 0.4), ("worst", 1, 0.1))
    ]
    assert page.count("<strong>solver</strong>") == page.count("[the conversation of turn 0]") == 9
    assert '<pre class="said">4 0.9</pre>' in page and page.count("<details open>") == 1


def test_one_trajectory_is_shown_once(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", [record(trajectory(0, 1, 0, evaluation=True))])
    assert len(titles(evaluated_trajectories(run.path))) == 1


def test_a_run_without_them_has_no_section(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", [record(trajectory(1, 1, 0))])
    assert evaluated_trajectories(run.path) == ""
    run.samples.unlink()
    assert evaluated_trajectories(run.path) == ""
    run = recorded_run(tmp_path / "failed", [record(trajectory(0, 1, 0, evaluation=True, failure="late"))])
    assert evaluated_trajectories(run.path) == ""


def test_long_texts_and_many_turns_are_cut(tmp_path: Path) -> None:
    one = trajectory(0, 1, 0, evaluation=True, text="<b>" * 100_000)
    many = tuple(one.turns[1]._replace(number=number, text="x" * 1000) for number in range(1, 500))
    run = recorded_run(tmp_path / "run", [record(one._replace(turns=(one.turns[0], *many)))])
    page = evaluated_trajectories(run.path)
    assert len(page) < 200_000 and "more characters)" in page and "400 later turns are left out" in page
    assert "<b>" not in page and "&lt;b&gt;" in page


def test_a_damaged_file_is_named_and_the_report_is_written(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", evaluation(0))
    page = write_report(run.path).read_text()
    assert "Trajectories of evaluations" in page
    run.samples.write_bytes(b"x" * 9000)
    page = write_report(run.path).read_text()
    assert "samples.sqlite: can&#x27;t be read: file is not a database" in page
