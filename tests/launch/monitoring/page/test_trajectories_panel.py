"""The panel of trajectories: filters, pages of the list, conversations with tokens, long texts in parts."""

from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.messages import Query
from flexmarl.launch.config.config_reading import resolve, to_yaml
from flexmarl.launch.errors import InvalidCondition, SamplesUnreadable
from flexmarl.launch.monitoring.page import trajectories_panel
from flexmarl.launch.monitoring.page.recorded_run import RecordedRun
from flexmarl.launch.run_folder.samples.sample_file import SampleFile

from ...conftest import SIMULATED_POLICIES, TINY
from ...run_folder.samples.files import NO_LIMIT, compared, record, recorded_run, trajectory

CONFIG = to_yaml(resolve(str(TINY), [*SIMULATED_POLICIES]))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    records = [
        *(record(trajectory(step, 1, 0, step / 10), trajectory(step, 1, 1, 0.5)) for step in range(1, 9)),
        record(trajectory(8, 7, 0, 0.25, evaluation=True)),
        record(trajectory(8, 2, 0, failure="boom")),
    ]
    run = RecordedRun(recorded_run(tmp_path / "run", records, CONFIG).path)
    yield run
    run.close()


def names(run: RecordedRun, **query: str) -> list[str]:
    return [row["name"] for row in trajectories_panel.view(run, query)["rows"]]


def test_the_newest_come_first_and_every_filter_narrows(run: RecordedRun) -> None:
    shown = trajectories_panel.view(run, {})
    assert shown["total"] == 18 and shown["agents"] == ["judge", "solver"]
    first = shown["rows"][0]
    assert (first["name"], first["reward"], first["turns"], first["tokens"]) == ("8e0.q7", 0.5, 2, 3)
    assert names(run, kind="evaluation") == ["8e0.q7"]
    assert names(run, failed="1", order="best") == ["8t0.q2"]
    assert names(run, step="2-3", order="oldest") == ["2t0.q1", "2t1.q1", "3t0.q1", "3t1.q1"]
    assert names(run, agent="solver", reward="<0.2") == ["1t0.q1"]
    assert names(run, agent="solver", order="worst", kind="training")[:2] == ["1t0.q1", "2t0.q1"]
    assert names(run, query="7+2") == ["8e0.q7"]
    assert names(run, answer="no", step="8", kind="training") == ["8t1.q1", "8t0.q1"]
    assert names(run, skip="17") == ["1t0.q1"]
    empty = trajectories_panel.view(run, {"agent": "other"})
    assert empty["rows"] == [] and "fits agent=other" in empty["words"]
    with pytest.raises(InvalidCondition):
        names(run, reward="high")


def test_one_is_shown_as_a_conversation_with_its_tokens(run: RecordedRun) -> None:
    shown = trajectories_panel.view(run, {"of": "8e0.q7", "tokens": "1"})
    solver, judge = shown["turns"]
    assert shown["rewards"] == {"solver": 0.25, "judge": 0.75} and "evaluation after step 8" in shown["title"]
    assert solver["prompt"] == [{"kind": "text", "text": "7+2=", "total": 4}]
    assert solver["tokens"] == ["4", "\x02"] and solver["logprobs"] == [-0.5, -0.01]
    assert (solver["advantage"], solver["versions"], solver["is_cut"]) == (0.25, [8], False)
    assert judge["prompt"][0] == {"kind": "turn", "turn": 0, "is_branch": False} and judge["is_cut"]
    assert "tokens" not in trajectories_panel.view(run, {"of": "8e0.q7"})["turns"][0]


def test_those_of_the_same_query_in_another_run_are_listed_the_nearest_first(run: RecordedRun) -> None:
    def alike(name: str) -> list[str]:
        return [row["name"] for row in trajectories_panel.view(run, {"like": name})["rows"]]

    assert alike("5t1.q1")[:4] == ["5t1.q1", "5t0.q1", "6t1.q1", "4t1.q1"] and len(alike("5t1.q1")) == 16
    assert alike("3e4.q7") == ["8e0.q7"]
    assert alike("3t0.q") == alike("no name") == [], "a part of an id is another query"


def test_tokens_have_the_difference_of_trainer_and_engine_where_that_is_recorded(tmp_path: Path) -> None:
    one = trajectory(1, 1, 0)
    directory = recorded_run(tmp_path / "run", [record(one, trajectory(1, 1, 1))])
    file = SampleFile(directory.samples, 50, NO_LIMIT)
    file.add_compared([compared(one._replace(turns=one.turns[:1]), by=-0.25, version=3)])
    file.close()
    run = RecordedRun(directory.path)
    solver, judge = trajectories_panel.view(run, {"of": "1t0.q1", "tokens": "1"})["turns"]
    assert solver["differences"] == [-0.25, -0.25] and solver["trainer_version"] == 3
    assert solver["difference"] == {"mean": 0.25, "most": 0.25, "place": 0}
    assert judge["differences"] == [] and judge["difference"] is judge["trainer_version"] is None
    run.close()


def test_tokens_are_numbers_if_the_config_is_of_another_version(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path / "run", [record(trajectory(1, 1, 0))], "of: another version\n").path
    run = RecordedRun(folder)
    assert trajectories_panel.view(run, {"of": "1t0.q1", "tokens": "1"})["turns"][0]["tokens"] == [
        "<52>",
        "<2>",
    ]
    run.close()


def test_a_long_text_comes_in_parts(tmp_path: Path) -> None:
    text = "".join(map(str, range(20_000)))
    run = RecordedRun(recorded_run(tmp_path / "run", [record(trajectory(1, 1, 0, text=text))], CONFIG).path)
    part = trajectories_panel.view(run, {"of": "1t0.q1"})["turns"][0]["text"]
    assert part["total"] == len(text) > len(part["text"])
    whole = part["text"]
    while rest := trajectories_panel.view(run, {"of": "1t0.q1", "place": "0", "from": str(len(whole))})[
        "text"
    ]:
        whole += rest
    assert whole == text
    assert trajectories_panel.view(run, {"of": "1t0.q1", "place": "0.0", "from": "1"})["text"] == "+2="
    assert trajectories_panel.view(run, {"of": "1t0.q1", "place": "9.9"})["text"] == ""
    run.close()


@pytest.mark.parametrize("name", ["", "9t0.q1", "8t0", "xt0.q1", "8x0.q1", "8t0.", "8t²."])
def test_a_trajectory_that_is_gone_is_named(run: RecordedRun, name: str) -> None:
    with pytest.raises(SamplesUnreadable, match="no trajectory"):
        trajectories_panel.view(run, {"of": name})


def test_an_id_may_be_any_text(tmp_path: Path) -> None:
    strange = "a/b.c?\x1b\u202e%41"
    one = trajectory(1, 1, 0)._replace(query=Query(strange, "text"))
    run = RecordedRun(recorded_run(tmp_path / "run", [record(one)], CONFIG).path)
    [name] = names(run)
    assert name.isascii() and name.isprintable()
    assert trajectories_panel.view(run, {"of": name})["name"] == name
    run.close()


def test_a_run_without_trajectories_has_a_reason(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path / "run", [], CONFIG)
    folder.samples.unlink()
    with pytest.raises(SamplesUnreadable, match="no trajectory is recorded yet"):
        trajectories_panel.view(RecordedRun(folder.path), {})


def test_a_damaged_file_is_named_and_read_again_when_it_is_whole(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path / "run", [record(trajectory(1, 1, 0))], CONFIG)
    whole = folder.samples.read_bytes()
    folder.samples.write_bytes(b"no database" * 100)
    run = RecordedRun(folder.path)
    with pytest.raises(SamplesUnreadable, match=r"samples\.sqlite"):
        trajectories_panel.view(run, {})
    folder.samples.write_bytes(whole)
    assert names(run) == ["1t0.q1"]
    run.close()
