"""The command ``flexmarl simulate``."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click import UsageError
from click.testing import CliRunner, Result

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.cli.simulate import simulate
from flexmarl.launch.cli.train import train
from flexmarl.launch.simulate.chaos.chaos_case import draw_case
from flexmarl.launch.simulate.chaos.checks import Problem
from flexmarl.launch.simulate.chaos.examination import Failure

SCENARIO = Path(__file__).parents[1] / "simulate" / "scenario.yaml"


def run(runs: Path, *words: str) -> Result:
    return CliRunner().invoke(simulate, [str(SCENARIO), "--runs", str(runs), *words], catch_exceptions=False)


def test_it_prints_a_run_and_writes_an_ordinary_folder(tmp_path: Path) -> None:
    done = run(tmp_path, "--name", "first", "--json")
    figures = json.loads(done.output)
    assert figures["steps"] == 1 and figures["instances"] == 2 and figures["slots"] == 2
    parts = figures["rollout_alone_s"] + figures["overlap_s"] + figures["after_rollout_s"]
    assert abs(parts - figures["step_s"]) < 1e-6 and figures["step_s"] > 2.0, (
        "delays and rewards take two seconds"
    )
    assert 0.0 < figures["instances_busy"] < 1.0 and 0.0 < figures["training_busy"] < 1.0
    rows = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {path.name for path in (tmp_path / "first").iterdir()} >= {
        "config.yaml",
        "events.jsonl",
        "checkpoints",
    }


def test_a_seed_decides_the_figures(tmp_path: Path) -> None:
    texts = {
        name: run(tmp_path, "--name", name, "--json", "--seed", seed).output
        for name, seed in (("a", "7"), ("b", "7"), ("c", "8"))
    }
    assert texts["a"] == texts["b"] != texts["c"]
    first, again = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in "ab")
    assert first == again


def test_a_folder_that_exists_is_refused_without_an_offer_to_continue_it(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    with pytest.raises(ConfigError, match="first exists already: choose another --name$"):
        run(tmp_path, "--name", "first")


def test_a_simulation_is_not_continued_by_processes(tmp_path: Path) -> None:
    run(tmp_path, "--name", "first")
    with pytest.raises(
        ConfigError, match="first is a simulation: `flexmarl simulate` plays it from its start"
    ):
        CliRunner().invoke(train, ["--resume", str(tmp_path / "first")], catch_exceptions=False)


def test_the_words_for_people_name_the_longest_part(tmp_path: Path) -> None:
    text = run(tmp_path, "--name", "first", "mode=sync").output
    assert "s a step" in text and "The longest part: " in text and str(tmp_path / "first") in text
    assert "rollouts and training     0.00 s" in text, "a barrier stands between them"


def test_a_run_is_played_again_with_the_lengths_that_it_had(tmp_path: Path) -> None:
    run(tmp_path, "--name", "first", "workload.agents.solver.answer.median=20")
    run(tmp_path, "--name", "again", "--from", str(tmp_path / "first"))
    rows = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        for name in ("first", "again")
    ]
    first, again = (row["turn_tokens_p50/solver"] for row in rows)
    assert 0.5 < again / first < 2.0, "the scenario itself has a median of 50"


def chaos(*words: str) -> Result:
    return CliRunner().invoke(simulate, [*words], catch_exceptions=False, standalone_mode=False)


def test_chaos_examines_seeds_and_counts_the_clean_ones() -> None:
    done = chaos("--chaos", "2", "--seed", "4", "--json")
    record = json.loads(done.stdout)
    assert record.pop("seed_s") > 0.0 and record == {"clean": 2, "failures": [], "stopped": False}
    assert done.return_value == 0


def test_a_seed_that_fails_prints_the_command_that_plays_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure(draw_case(3), (0,), [Problem("ends", "it did not end")])
    monkeypatch.setattr("flexmarl.launch.cli.chaos.examine_seed", lambda seed: failure if seed == 3 else None)
    done = chaos("--chaos", "3", "--seed", "2")
    assert "ends: it did not end" in done.stdout and "1 fail" in done.stdout and done.return_value == 1
    assert "again: flexmarl simulate --chaos-seed 3 --faults 0" in done.stdout


def test_ctrl_c_prints_the_count_so_far_and_the_command_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def examine(seed: int) -> None:
        if seed == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr("flexmarl.launch.cli.chaos.examine_seed", examine)
    done = chaos("--chaos", "5", "--seed", "10")
    assert "2 seeds from 10 on are clean, 0 fail; " in done.stdout and done.return_value == 130
    assert "stopped; the others: flexmarl simulate --chaos 3 --seed 12\n" in done.stdout


def test_a_long_search_says_each_minute_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 10_000, 10))
    monkeypatch.setattr("flexmarl.launch.cli.chaos.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr("flexmarl.launch.cli.chaos.examine_seed", lambda seed: None)
    lines = [line for line in chaos("--chaos", "20", "--seed", "4000").stderr.splitlines() if "clean" in line]
    assert 1 <= len(lines) < 10 and "seeds from 4000 on are clean, 0 fail; " in lines[0]
    assert "s a seed; " in lines[0] and " more take about " in lines[0]


def test_a_seed_is_played_again_with_some_of_its_faults(tmp_path: Path) -> None:
    done = chaos("--chaos-seed", "5", "--faults", "none", "--runs", str(tmp_path), "--name", "again")
    assert "clean; its files:" in done.stdout and "InjectedFault" not in done.stdout
    assert (tmp_path / "again" / "run" / "events.jsonl").exists()
    with pytest.raises(ConfigError, match="--faults 99: seed 5 has"):
        chaos("--chaos-seed", "5", "--faults", "99", "--runs", str(tmp_path))


def test_chaos_has_no_scenario() -> None:
    for words in ([], [str(SCENARIO), "--chaos", "1"]):
        with pytest.raises(UsageError, match="give a SCENARIO, or --chaos N"):
            chaos(*words)
