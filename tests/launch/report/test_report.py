import json
import math
import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.run_events import (
    CheckpointSaved,
    Evaluated,
    RunEnded,
    RunResumed,
    RunStarted,
    TrajectoryFailed,
)
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.formatting import change, compact, duration
from flexmarl.launch.json_lines import event_to_json, metrics_from_json
from flexmarl.launch.report.charts import (
    NARROW,
    WIDE,
    Axes,
    Band,
    Line,
    column_chart,
    line_chart,
    smooth,
    thin,
    ticks,
)
from flexmarl.launch.report.report import write_report
from flexmarl.launch.report.run_history import PARTS, History, first_and_last, load_history, split_step

FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)
AXES = Axes(name="chart", title="A <title>", description="d & d", x_label="step", y_label="y")
STARTED = event_to_json(RunStarted(Step(0), "3.12", "linux", 2, 17))
RESUMED = event_to_json(RunResumed(Step(1), "3.12", "linux", 2, 17))
ENDED = event_to_json(RunEnded(False, Step(1)))
VOID = {"meta", "br", "link", "img", "input", "hr"}


def record(step: int, agents: Sequence[str] = ("sorter", "checker"), **more: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        "step": step,
        "time_s": 0.07 * step,
        "step_s": 0.07,
        "versions": dict.fromkeys(agents, step),
        "generated_by": dict.fromkeys(agents, step - 1),
        "tokens": 1024,
        "tokens_per_s": 14400.0,
        "overlap_s": 0.012,
        "rollout_s": 0.05,
        "failed_trajectories": 0,
        "stale_samples": 0,
        "loop_lag_ms/store": 0.4,
        "rss_mib/store": 350.0 + step,
    }
    for agent in agents:
        line |= {
            f"reward/{agent}": 0.5 + 0.4 * math.sin(step / 50),
            f"backward_s/{agent}": 0.013,
            f"optimizer_s/{agent}": 0.001,
            f"publish_s/{agent}": 0.002,
            f"loss/{agent}": 0.01,
            f"grad_norm/{agent}": 0.4,
            f"samples/{agent}": 128,
            f"nonzero_advantage_share/{agent}": 0.7,
        }
    return line | more


def written(folder: Path, records: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]] = ()) -> str:
    """The report of a run folder that holds these lines."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return write_report(folder).read_text()


class Checker(HTMLParser):
    """Refuses tags that don't match and collects ids and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        assert not any(name in ("href", "src") or name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> Checker:
    """A whole, self-contained page without numbers that can't be drawn."""
    checker = Checker(page)
    assert len(checker.ids) == len(set(checker.ids))
    assert "nan" not in re.sub(r"<script>.*</script>", "", page, flags=re.S).lower().split()
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.S):
        ElementTree.fromstring(svg)
        assert not re.search(r'[ ",](nan|inf|-inf)[ ",]', svg)
    return checker


# --------------------------------------------------------------------------- the page


def test_the_headline_says_what_was_learned(tmp_path: Path) -> None:
    before = event_to_json(Evaluated(Step(0), 1.0, {"accuracy": 0.041}))
    records = [record(step) | {"reward/sorter": step / 100, "reward/checker": 0.5} for step in range(1, 101)]
    records[-1] |= {"eval/accuracy": 0.934}
    (tmp_path / "config.yaml").write_text("mode: strict\n")
    page = written(tmp_path, records, [STARTED | {"time": 0}, before, ENDED | {"time": 9}])
    check(page)
    assert "Accuracy rose from 4.1% to 93.4% in 100 steps" in page
    assert "sorter 0.030 → 0.980, checker 0.500 → 0.500" in page
    assert "mode strict · started 1970-01-01 00:00:00 UTC" in page
    assert "still running" not in page
    assert "<dd>7 s" in page  # wall time
    assert "14.6k tokens/s" in page and "102k tokens" in page
    assert "<dd>1.2 s<small>17.1% of step time" in page


def test_what_only_some_runs_measure_is_shown_where_it_is(tmp_path: Path) -> None:
    plain = written(tmp_path, [record(step) for step in range(1, 4)], [])
    assert "value loss" not in plain and "Resumed turns" not in plain
    more: dict[str, Any] = {"value_loss/sorter": 0.125, "clip_fraction/sorter": 0.05, "resumed_turns": 2}
    more |= {"stale_samples": 8, "max_staleness": 2}
    page = written(tmp_path, [record(step, **more) for step in range(1, 4)], [])
    check(page)
    assert "<td>0.125</td>" in page and "<td>5.00%</td>" in page
    assert "<dt>Resumed turns</dt><dd>6<" in page
    assert "<dt>Stale samples</dt><dd>24<small>by at most 2 versions" in page


def test_an_agents_turns_are_shown_if_they_are_known(tmp_path: Path) -> None:
    assert "truncated" not in written(tmp_path, [record(1)])
    of_sorter = {"turns/sorter": 8, "tokens/sorter": 100, "truncated_turns/sorter": 2}
    page = written(tmp_path, [record(step) | of_sorter for step in (1, 2)])
    check(page)
    (row,) = re.findall(r'<tr><th scope="row">sorter</th><td>0.5.*?</tr>', page)
    assert row.endswith("<td>12.5</td><td>25.0%</td></tr>")


def test_statistics_of_the_last_step_are_shown_by_actor(tmp_path: Path) -> None:
    lines = [record(n) | {"actor.rows_ready/store": n, "mailbox_waiting/store": 5 - n} for n in (1, 2, 3)]
    page = written(tmp_path, lines)
    check(page)
    assert "Statistics of the actors after step 3" in page
    assert '<tr><th scope="row">store</th><td>rows_ready</td><td>3</td></tr>' in page
    (store,) = re.findall(r'<tr><th scope="row">store</th><td>0.40.*?</tr>', page)
    assert store.endswith("<td>4</td></tr>"), "at most 4 requests waited"


def test_agents_of_one_policy_have_two_rewards_and_one_loss(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("agents: {sorter: {policy: shared}, checker: {policy: shared}}")
    lines = [
        record(step, ["shared"]) | {"reward/sorter": 0.5, "reward/checker": 0.25, "max_staleness/shared": 2}
        for step in range(1, 4)
    ]
    for line in lines:
        del line["reward/shared"]
    page = written(tmp_path, lines)
    check(page)
    assert '<tr><th scope="row">sorter</th><td>shared</td><td>0.500</td><td>0.500</td></tr>' in page
    assert '<tr><th scope="row">checker</th><td>shared</td><td>0.250</td><td>0.250</td></tr>' in page
    (row,) = re.findall(r'<tr><th scope="row">shared</th>.*?</tr>', page)
    assert "<td>3</td><td>384</td><td>2</td>" in row, "version, samples, staleness"
    assert set(re.findall(r'data-name="(.*?)"', page)) == {"sorter", "checker", "shared", "tokens/s"}
    history = load_history(tmp_path)
    assert history.agents == ["sorter", "checker"] and history.policies == ["shared"]
    assert history.of_policy(PolicyName("shared"), lambda policy: policy.loss) == [
        (n, 0.01) for n in (1, 2, 3)
    ]
    assert history.of_agent(AgentName("shared"), lambda agent: agent.reward) == []


@pytest.mark.parametrize("agents", [1, 2, 20])
@pytest.mark.parametrize("steps", [1, 2, 3, 30, 1000])
def test_any_number_of_agents_and_steps(tmp_path: Path, agents: int, steps: int) -> None:
    names = [f"agent-{index}" for index in range(agents)]
    page = written(tmp_path, [record(step, names) for step in range(1, steps + 1)])
    checker = check(page)
    assert checker.tags.count("h2") == 6
    assert all(f'<th scope="row">{name}</th>' in page for name in names)
    assert f"{steps} step" in page


@pytest.mark.parametrize(
    ("events", "over"),
    [([], False), ([STARTED], False), ([ENDED], True), ([ENDED, RESUMED], False)],
)
def test_a_run_without_an_end_is_said_to_have_none(
    tmp_path: Path, events: list[dict[str, Any]], over: bool
) -> None:
    page = written(tmp_path, [record(1)], events)
    assert ("no end recorded" in page) is not over


def test_an_empty_folder_and_a_missing_one(tmp_path: Path) -> None:
    page = write_report(tmp_path).read_text()
    check(page)
    assert "No training step has finished" in page
    with pytest.raises(NotADirectoryError):
        write_report(tmp_path / "missing")


def test_only_an_evaluation_before_training(tmp_path: Path) -> None:
    page = written(tmp_path, [], [event_to_json(Evaluated(Step(0), 1.0, {"accuracy": 0.5}))])
    check(page)
    assert "No training step has finished" in page and "1 evaluation; step 0" in page


def test_all_text_from_the_run_is_escaped(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>'
    folder = tmp_path / "<b>run"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"mode: '{evil}'\n")
    event = event_to_json(TrajectoryFailed(Step(1), evil, evil, evil)) | {"time": evil, "field": evil}
    line = record(1, [evil], **{f"rss_mib/{evil}": 3.0})
    page = written(folder, [line, record(2, [evil])], [event, {"event": evil}])
    checker = check(page)
    assert checker.tags.count("script") == 1
    assert "alert(1)</script>" not in page
    assert "<b>" not in page


def test_the_first_traceback_is_shown(tmp_path: Path) -> None:
    events = [
        event_to_json(CheckpointSaved(Step(1), "checkpoints/step_000001")),
        event_to_json(TrajectoryFailed(Step(2), "2:q1_3", "first", "ValueError: first")),
        event_to_json(TrajectoryFailed(Step(2), "2:q2_3", "second", "ValueError: second")),
    ]
    page = written(tmp_path, [record(1), record(2, failed_trajectories=3)], events)
    check(page)
    assert "<p>3 failed and were dropped.</p>" in page
    assert "<pre>ValueError: first</pre>" in page and "ValueError: second" not in page
    assert "trajectory: 2:q1_3" in page


def test_a_half_written_file_is_reported_and_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + '\n[1]\n{"step": 2, "rew')
    page = write_report(tmp_path).read_text()
    check(page)
    assert "2 lines of metrics.jsonl and events.jsonl could not be read" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "text", None, [1], True, 10**400, -1e308, {}])
def test_values_that_are_no_numbers_count_as_missing(tmp_path: Path, bad: Any) -> None:
    good = [record(step) for step in (1, 2, 3)]
    keys = [key for key in good[1] if key != "step"]
    good[1] |= dict.fromkeys(keys, bad)
    check(written(tmp_path, [*good, {"step": bad, "reward/sorter": 1.0}]))


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*record(1, ["a"]), "eval/accuracy"]),
            st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=3)),
        ),
        max_size=8,
    )
)
def test_any_records_make_a_page(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]
) -> None:
    first = len(records) // 2
    lines = [record(first + index // 2, ["a"]) | damage for index, damage in enumerate(records)]
    check(written(tmp_path_factory.mktemp("run"), lines))


def test_20000_steps_are_fast_and_small(tmp_path: Path) -> None:
    line = json.dumps(record(0))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(line.replace('"step": 0', f'"step": {step}') + "\n" for step in range(1, 20001))
    )
    began = time.process_time()
    path = write_report(tmp_path)
    assert time.process_time() - began < 5  # 1 s on an idle machine
    assert path.stat().st_size < 2_000_000


# --------------------------------------------------------------------------- reading a run


def step_of(line: dict[str, Any]) -> StepMetrics:
    step = metrics_from_json(line)
    assert step is not None
    return step


def load(folder: Path, records: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]] = ()) -> History:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return load_history(folder)


def test_steps_lost_before_a_resume_are_replaced(tmp_path: Path) -> None:
    lost = [record(step, tokens=1) for step in range(1, 13)]
    again = [record(step, tokens=2, time_s=0.07 * (step - 9)) for step in range(10, 12)]
    history = load(tmp_path, [*lost, *again])
    assert [step.step for step in history.steps] == list(range(1, 12))
    assert history.total(lambda step: step.tokens) == 9 * 1 + 2 * 2
    assert history.resumes == [10]
    assert history.wall_s == pytest.approx(0.07 * (12 + 2))


def test_a_clock_that_goes_on_after_a_resume_counts_once(tmp_path: Path) -> None:
    first = [record(step) for step in range(1, 11)]
    again = [record(step, time_s=0.07 * step) for step in range(6, 21)]
    assert load(tmp_path, [*first, *again]).wall_s == pytest.approx(0.07 * (10 + 15))


def test_a_clock_that_starts_again_is_a_resume_too(tmp_path: Path) -> None:
    """The lost steps may have been removed from the file before the run resumed."""
    again = [record(step, time_s=0.07 * (step - 10)) for step in range(11, 21)]
    history = load(tmp_path, [*(record(step) for step in range(1, 11)), *again])
    assert history.resumes == [11] and len(history.steps) == 20
    assert history.wall_s == pytest.approx(0.07 * 20)


def test_an_evaluation_written_apart_joins_its_step(tmp_path: Path) -> None:
    evaluated = event_to_json(Evaluated(Step(2), 1.0, {"accuracy": 0.5}))
    history = load(tmp_path, [record(1), record(2)], [evaluated])
    assert history.evaluated("accuracy") == [(2, 0.5)]
    assert len(history.steps) == 2 and not history.resumes
    assert history.of_step(lambda step: step.tokens) == [(1, 1024), (2, 1024)]


def test_split_of_a_step_where_agents_train_one_after_the_other() -> None:
    split = dict(zip(PARTS, split_step(step_of(record(1, ["a", "b"]))), strict=True))
    assert split == pytest.approx(
        {
            "rollout only": 0.038,
            "rollout and training": 0.012,
            "training only": 0.014,
            "optimizer": 0.002,
            "publishing weights": 0.004,
            "other": 0.0,
        }
    )


@settings(deadline=None)
@given(st.lists(FINITE, min_size=9, max_size=9))
def test_the_parts_of_a_step_add_up_and_are_never_negative(values: list[float]) -> None:
    keys = [
        "rollout_s",
        "overlap_s",
        *(f"{key}_s/{agent}" for key in ("backward", "optimizer", "publish") for agent in "ab"),
    ]
    step_s = abs(values[-1])
    line = record(1, ["a", "b"]) | dict(zip(keys, values, strict=False)) | {"step_s": step_s}
    parts = split_step(step_of(line))
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(step_s, rel=1e-6, abs=1e-6)


def test_first_and_last() -> None:
    points = [(float(step), float(step)) for step in range(1, 41)]
    assert first_and_last(points) == (1.5, 39.5)
    assert first_and_last(points[:1]) == (1.0, 1.0)
    assert first_and_last([]) is None


# --------------------------------------------------------------------------- charts and words


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), FINITE), max_size=40), st.sampled_from([WIDE, NARROW]))
def test_curves_stay_inside_the_frame(points: list[tuple[int, float]], width: int) -> None:
    line = Line("<a&b>", sorted({x: (float(x), y) for x, y in points}.values()), 9)
    root = ElementTree.fromstring(line_chart(AXES, [line], width))
    assert [child.text for child in root if child.tag in ("title", "desc")] == ["A <title>", "d & d"]
    for polyline in root.iter("polyline"):
        for pair in (polyline.get("points") or "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width and 0 <= y <= 250


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30))
def test_columns_stand_on_one_another(values: list[float]) -> None:
    edges = [float(index) for index in range(len(values) + 1)]
    bands = [Band("a", values, "c0"), Band("b", values, "c1")]
    root = ElementTree.fromstring(column_chart(AXES, edges, bands))
    groups = root.findall("g")
    assert len(groups) == len(values)
    for group in groups:
        rects = [(float(rect.get("y", "")), float(rect.get("height", ""))) for rect in group.findall("rect")]
        for (lower_y, _), (upper_y, upper_height) in pairwise(rects):
            assert upper_y + upper_height == pytest.approx(lower_y, abs=0.11)


@settings(deadline=None)
@given(FINITE, st.floats(1e-6, 1e12), st.integers(1, 10))
def test_ticks_are_round_and_inside(low: float, span: float, wanted: int) -> None:
    high = low + span
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high, wanted)
    slack = 1e-6 * span + 1e-9 * abs(low)
    assert all(low - slack <= tick <= high + slack for tick in found)
    assert len(found) <= wanted + 1


@settings(deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=300), st.integers(4, 50))
def test_thinning_keeps_the_extremes_and_the_ends(values: list[float], limit: int) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 4)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert max(y for _, y in kept) == max(values) and min(y for _, y in kept) == min(values)


def test_smoothing_is_a_running_mean() -> None:
    points = [(float(index), float(index * index)) for index in range(5)]
    assert smooth(points, 0) == points
    assert smooth(points, 1) == [(0, 0.5), (1, 5 / 3), (2, 14 / 3), (3, 29 / 3), (4, 12.5)]
    assert smooth([], 3) == []


def test_a_change_in_words() -> None:
    assert change(0.041, 0.934, ".1%") == "rose from 4.1% to 93.4%"
    assert change(0.5, 0.25, ".3f") == "fell from 0.500 to 0.250"
    assert change(0.5, 0.50001, ".1%") == "stayed at 50.0%"


def test_numbers_in_words() -> None:
    assert [compact(x) for x in (0, 0.01234, 999.9, 14400, 2_000_000, 3e9)] == [
        "0",
        "0.0123",
        "1k",
        "14.4k",
        "2M",
        "3G",
    ]
    assert [duration(x) for x in (0.012, 35.1, 125, 11220)] == [
        "0.012 s",
        "35.1 s",
        "2 min 05 s",
        "3 h 07 min",
    ]
