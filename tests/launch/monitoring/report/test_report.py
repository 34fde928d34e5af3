"""The report's page: what it shows of a run, and of damaged or empty folders."""

import json
import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.run_events import (
    CheckpointSaved,
    Evaluated,
    NodeLost,
    NodeRefused,
    PolicyResumed,
    PolicySuspended,
    RunEnded,
    RunEvent,
    RunResumed,
    RunStarted,
    SlotLost,
    TrajectoryFailed,
)
from flexmarl.launch.cli import registry as commands
from flexmarl.launch.monitoring.report.report import render_body, write_report
from flexmarl.launch.monitoring.report.run_history import History, LoggedEvent, load_history
from flexmarl.launch.run_folder.json_lines import event_to_json

from .records import record

STARTED = event_to_json(RunStarted(Step(0), "3.12", "linux", 2, 17))
RESUMED = event_to_json(RunResumed(Step(1), "3.12", "linux", 2, 17))
ENDED = event_to_json(RunEnded(False, Step(1)))
VOID = {"meta", "br", "link", "img", "input", "hr"}


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
    assert "<dd>9 s<small>from start to end; steps: 7 s" in page
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


def test_instances_and_their_moves_are_shown(tmp_path: Path) -> None:
    figures = {"actor.turns.solver-0/router": 4, "actor.queue_s.solver-0/router": 2.0}
    figures |= {
        "actor.service_s.solver-0/router": 30.0,
        "actor.moves/router": 1,
        "actor.batch_size/solver-0": 3.25,
    }
    figures |= {"actor.engine_prompt_tokens/solver-0": 800, "actor.engine_generated_tokens/solver-0": 120}
    moved = {
        "time": 1.0,
        "event": "instance_moved",
        "instance": "solver-0",
        "policy": "solver",
        "to": "judge",
    }
    page = written(tmp_path, [record(1), record(2) | figures], [moved | {"reason": "judge has <9.0> turns"}])
    check(page)
    section = page.partition("<h2>Instances</h2>")[2].partition("<h2>")[0]
    row = "".join(f"<td>{cell}</td>" for cell in ("4", "0.5", "7.5", "3.2", "800", "120"))
    assert f'<th scope="row">solver-0</th>{row}' in section
    assert "1 move between policies" in section and "judge has &lt;9.0&gt; turns" in section
    assert "<h2>Instances</h2>" not in written(tmp_path, [record(1)])


def test_the_times_of_new_weights_are_shown(tmp_path: Path) -> None:
    def loads(step: int, seconds: float) -> dict[str, Any]:
        kinds = {"pause": 1.0, "transfer": 0.5, "load": 0.25}
        means = {f"{kind}_mean_s/sorter": seconds * part for kind, part in kinds.items()}
        return (
            record(step)
            | means
            | {f"{kind}_max_s/sorter": 2 * seconds * part for kind, part in kinds.items()}
        )

    page = written(tmp_path, [loads(1, 0.01), loads(2, 0.03), record(3)])
    check(page)
    section = page.partition("<h3>New weights</h3>")[2].partition("</table>")[0]
    row = "".join(f"<td>{cell}</td>" for cell in ("20", "60", "10", "30", "5", "15"))
    assert f'<th scope="row">sorter</th>{row}' in section and "checker" not in section
    assert "New weights" not in written(tmp_path, [record(1)])


def test_the_paths_of_new_weights_are_shown_with_their_reasons(tmp_path: Path) -> None:
    def chosen(instance: str, path: str, **refused: str) -> dict[str, Any]:
        event = {"time": 1.0, "event": "weights_path_chosen", "policy": "solver", "instance": instance}
        return event | {"path": path, "reason": f"it has <{path}>", "refused": refused}

    events = [chosen("solver-0", "cuda_ipc"), chosen("solver-1", "shm", cuda_ipc="no device")]
    page = written(tmp_path, [record(1)], [*events, chosen("solver-2", "cuda_ipc")])
    check(page)
    section = page.partition("<h2>Instances</h2>")[2].partition("<h2>")[0]
    assert "<td>cuda_ipc</td><td>solver-0, solver-2</td><td>it has &lt;cuda_ipc&gt;</td><td></td>" in section
    assert "<td>shm</td><td>solver-1</td><td>it has &lt;shm&gt;</td><td>cuda_ipc: no device</td>" in section


def test_the_load_of_devices_is_shown(tmp_path: Path) -> None:
    loads = [{"device_busy_percent/GPU-1": busy, "device_used_mib/GPU-1": 1000 * busy} for busy in (40, 60)]
    page = written(tmp_path, [record(step) | load for step, load in enumerate(loads, 1)])
    check(page)
    section = page.partition("<h3>Devices</h3>")[2].partition("</table>")[0]
    assert '<th scope="row">GPU-1</th><td>50</td><td>60000</td>' in section
    assert "<h3>Devices</h3>" not in written(tmp_path, [record(1)])


def test_a_shared_pool_shows_the_time_of_its_policies_and_why_they_were_suspended(tmp_path: Path) -> None:
    of_pool: dict[str, Any] = {
        f"{key}/{policy}": value
        for policy in ("sorter", "checker")
        for key, value in {
            "pool_computing_s": 3.0, "pool_idle_s": 0.0, "pool_swapping_s": 0.5, "pool_waiting_s": 1.5,
            "pool_suspended_s": 5.0, "suspensions": 2, "swapped_mib": 100.0, "repeated_micro_batches": 1,
        }.items()
    }  # fmt: skip
    events: list[RunEvent] = [
        PolicySuspended(PolicyName("sorter"), "slot-0", "no computation is ready", 25 << 20, 0.01, "shm"),
        PolicyResumed(PolicyName("sorter"), "slot-1", "its slots are free", 100 << 20, 0.04, "disk, shm"),
        SlotLost("slot-1", "killed by signal 9", "sorter", 3),
    ]
    lines = [{**event_to_json(event), "time": 100.0} for event in events]
    page = written(tmp_path, [record(1, **of_pool), record(2, **of_pool)], lines)
    assert "<h2>Training pool</h2>" in page
    for text in ("30.0%", "15.0%", "50.0%", "no computation is ready", "disk, shm", "killed by signal 9"):
        assert text in page
    assert "1 slot worker was lost" in page and "Events (1)" in page
    assert "Training pool" not in written(tmp_path, [record(1)])


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
    assert history.of_policy(PolicyName("shared"), "loss") == [(n, 0.01) for n in (1, 2, 3)]
    assert history.of_agent(AgentName("shared"), "reward") == []


@pytest.mark.parametrize("agents", [1, 2, 20])
@pytest.mark.parametrize("steps", [1, 2, 3, 30, 1000])
def test_any_number_of_agents_and_steps(tmp_path: Path, agents: int, steps: int) -> None:
    names = [f"agent-{index}" for index in range(agents)]
    page = written(tmp_path, [record(step, names) for step in range(1, steps + 1)])
    checker = check(page)
    assert checker.tags.count("h2") == 7
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


def test_every_sampling_of_the_evaluations_has_its_curves(tmp_path: Path) -> None:
    metrics = {
        "accuracy": 0.5,
        "sampled/accuracy": 0.25,
        "sampled/pass@1": 0.25,
        "sampled/pass@8": 0.75,
        "length": 9.0,
    }
    lines = [record(n) | {f"eval/{name}": value for name, value in metrics.items()} for n in (1, 2)]
    page = written(tmp_path, lines, [STARTED | {"time": 0}, ENDED | {"time": 9}])
    check(page)
    section = page.partition("<h2>Accuracy</h2>")[2].partition("<h2>")[0]
    for name in ("accuracy", "sampled/accuracy", "sampled/pass@1", "sampled/pass@8"):
        assert f"{name}: step 1: {metrics[name]:.1%}, step 2: {metrics[name]:.1%}" in section
    assert "length" not in section


def test_a_lost_and_a_refused_node_are_in_the_visible_part() -> None:
    lost = NodeLost("n2", "node n2 is lost: its process ended")
    refused = NodeRefused("n3", "tcp://10.0.0.3:1", ["recipe differs"])
    logged = tuple(LoggedEvent({}, event) for event in (lost, refused))
    visible = render_body(History("r", events=logged)).partition("<details>")[0]
    assert "node n2 is lost: its process ended" in visible and "recipe differs" in visible


def test_a_run_without_checkpoints_can_be_reported(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: r\n")
    result = CliRunner().invoke(commands.cli, ["report", str(tmp_path)], standalone_mode=False)
    assert result.return_value == 0 and (tmp_path / "report.html").exists(), result.exception


def test_the_headline_takes_the_figure_of_the_console(tmp_path: Path) -> None:
    before = event_to_json(Evaluated(Step(0), 1.0, {"exploitability": 0.536, "reward/solver": 0.0}), 1.0)
    last = record(2) | {"eval/reward/solver": 0.0, "eval/exploitability": 0.331}
    page = written(tmp_path, [record(1), last], [STARTED | {"time": 0}, before, ENDED | {"time": 9}])
    assert "<h1>Exploitability fell from 0.536 to 0.331 in 2 steps</h1>" in page
