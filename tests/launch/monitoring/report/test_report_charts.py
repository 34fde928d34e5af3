"""The charts of the report: each metric has one, and each curve can be seen."""

import re
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.names import Step
from flexmarl.actors.run_events import Evaluated, RunEnded
from flexmarl.launch.run_folder.json_lines import event_to_json

from .records import record
from .test_report import ENDED, STARTED, check, written

STEPS = range(1, 5)


def cells(page: str) -> dict[str, list[str]]:
    """The names of the curves of each small chart, by its heading; a chart with one curve has no legend."""
    found = {}
    for cell in re.findall(r'<figure class="cell">.*?</figure>', page, flags=re.S):
        [title] = re.findall(r"<h3>(.*?)</h3>", cell)
        assert title not in found
        found[title] = re.findall(r'data-name="(.*?)"', cell)
    return found


def test_figures_of_training_have_a_chart_each_by_policy(tmp_path: Path) -> None:
    figures = {
        "loss": "Loss", "grad_norm": "Gradient norm", "clip_fraction": "Clipped", "kl": "KL from the reference",
        "entropy": "Entropy", "ratio_deviation": "Ratio deviation", "advantage_mean": "Advantage, mean",
        "advantage_std": "Advantage, standard deviation", "nonzero_advantage_share": "Zero advantage",
    }  # fmt: skip
    lines = [
        record(step)
        | {f"{figure}/{policy}": 0.1 + 0.01 * step for figure in figures for policy in ("sorter", "checker")}
        for step in STEPS
    ]
    page = written(tmp_path, lines)
    check(page)
    found = cells(page)
    assert {title: found[title] for title in figures.values()} == {
        title: ["sorter", "checker"] for title in figures.values()
    }
    assert page.count("checker (same as sorter)") >= len(figures), "equal curves are named"
    for title in figures.values():
        section = page.partition(f"<h3>{title}</h3>")[2].partition("</figure>")[0]
        dashed = re.findall(r'<polyline class="line c1" stroke-dasharray="6 8"', section)
        assert len(dashed) == 1, "the other one shows in its gaps"


def test_a_figure_that_is_always_zero_is_named_instead_of_drawn(tmp_path: Path) -> None:
    page = written(
        tmp_path, [record(step) | {"clip_fraction/sorter": 0.0, "stale_samples/sorter": 0} for step in STEPS]
    )
    assert "Clipped" not in cells(page)
    assert "Zero in every step: clipped, stale samples." in page


def test_lengths_are_drawn_by_agent_and_truncated_turns_for_all(tmp_path: Path) -> None:
    of_turns = {
        f"{key}/{agent}": float(value)
        for agent in ("sorter", "checker")
        for key, value in (
            ("turns", 8), ("truncated_turns", 2), ("turn_tokens_p10", 3), ("turn_tokens_p50", 6),
            ("turn_tokens_p90", 9), ("turn_tokens_max", 16),
        )
    }  # fmt: skip
    page = written(tmp_path, [record(step) | of_turns for step in STEPS])
    check(page)
    found = cells(page)
    assert found["Truncated turns"] == ["sorter", "checker"]
    for agent in ("sorter", "checker"):
        assert found[f"Length of turns: {agent}"] == ["longest", "90%", "median", "10%"]


def test_each_metric_of_the_evaluations_has_its_chart(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("evaluation: {samplings: {sampled: {temperature: 1.0}}}\n")
    metrics = {
        "accuracy": 0.5, "pass@8": 1.0, "sampled/accuracy": 0.25, "length": 9.0, "sampled/length": 12.0,
        "reward/checker": 0.25, "reward/sorter": 0.75, "sampled/reward/sorter": 0.5, "exact": 0.0,
    }  # fmt: skip
    before = event_to_json(Evaluated(Step(0), 1.0, metrics))
    lines = [record(step) | {f"eval/{name}": value for name, value in metrics.items()} for step in STEPS]
    page = written(tmp_path, lines, [STARTED | {"time": 0}, before, ENDED | {"time": 9}])
    check(page)
    found = cells(page)
    assert found["Length"] == ["length", "sampled/length"]
    assert sorted(found["Reward"]) == ["reward/checker", "reward/sorter", "sampled/reward/sorter"]
    assert found["Exact"] == ["exact"], "also if it is always zero"
    accuracy = page.partition("<h2>Accuracy</h2>")[2].partition("<h2>")[0]
    assert set(re.findall(r'data-name="(.*?)"', accuracy)) == {"accuracy", "pass@8", "sampled/accuracy"}


def test_metrics_of_a_family_that_is_unknown_are_drawn_too(tmp_path: Path) -> None:
    """A workflow's own metrics in training steps, and those of other parts of a run."""
    more: dict[str, Any] = {
        "workflow/exact": 0.5,
        "workflow/moves": 12,
        "share/sorter": 0.75,
        "share/checker": 0.25,
        "elo/rivals": 1200.0,
        "opponent_score/rivals": 0.5,
    }
    page = written(tmp_path, [record(step) | more for step in STEPS])
    check(page)
    found = cells(page)
    assert found["workflow/exact"] == ["exact"] and found["workflow/moves"] == ["moves"]
    assert found["share"] == ["sorter", "checker"]
    assert found["Elo"] == found["Opponent score"] == ["rivals"]


def test_times_of_turns_are_means_of_each_step_by_policy(tmp_path: Path) -> None:
    # Turns and seconds since the router's start, which begins again where the run was resumed.
    sums = [
        (4, 2.0),
        (4, 2.0),
        (10, 14.0),
        (2, 1.0),
    ]
    lines = [
        record(step, ["a"])
        | {
            "actor.policy_turns.a/router": turns,
            "actor.policy_queue_s.a/router": seconds,
            "actor.policy_service_s.a/router": 2 * seconds,
        }
        for step, (turns, seconds) in zip(STEPS, sums, strict=True)
    ]
    page = written(tmp_path, lines)
    check(page)
    charts = page.partition("<h3>Times of a turn</h3>")[2]
    queue, service = re.findall(r'<figure class="cell">.*?</figure>', charts, flags=re.S)[:2]
    assert "Waiting for an instance" in queue and "at the end: a 0.5 s" in queue
    assert "At an instance" in service and "at the end: a 1 s" in service
    [points] = re.findall(r'data-name="a" points="(.*?)"', queue)
    assert len(points.split()) == 3, "no turn has ended in step 2"
    heights = [float(point.partition(",")[2]) for point in points.split()]
    assert heights[0] == heights[2] > heights[1], "0.5, 2 and 0.5 s"


@pytest.mark.parametrize("traceback", [None, "Traceback: <module>\nValueError"])
def test_the_report_of_a_failed_run_opens_with_the_error(tmp_path: Path, traceback: str | None) -> None:
    end = RunEnded(False, error="ActorFailed: trainer: loss <nan>", traceback=traceback)
    page = written(tmp_path, [record(1), record(2)], [STARTED, event_to_json(end)])
    check(page)
    assert "<h1>Failed after 2 steps</h1>" in page
    opening = page.partition("</header>")[2].partition('<dl class="facts">')[0]
    assert "ActorFailed: trainer: loss &lt;nan&gt;" in opening
    assert ("Traceback: &lt;module&gt;" in opening) is (traceback is not None)


def test_a_run_that_was_stopped_or_resumed_after_its_failure_has_not_failed(tmp_path: Path) -> None:
    stopped = event_to_json(RunEnded(True, error="stopped by SIGINT"))
    assert "The error" not in written(tmp_path, [record(1)], [STARTED, stopped])
    failed = event_to_json(RunEnded(False, error="lost"))
    again = {
        "time": 1.0,
        "event": "run_resumed",
        "step": 0,
        "python": "",
        "platform": "",
        "cpus": 1,
        "pid": 1,
    }
    assert "The error" not in written(tmp_path, [record(1)], [STARTED, failed, again, ENDED])
