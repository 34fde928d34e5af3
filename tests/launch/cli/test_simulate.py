"""The command ``flexmarl simulate``."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from flexmarl.launch.cli.simulate import simulate

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


def test_the_words_for_people_name_the_longest_part(tmp_path: Path) -> None:
    text = run(tmp_path, "--name", "first", "mode=sync").output
    assert "s a step" in text and "The longest part: " in text and str(tmp_path / "first") in text
    assert "rollouts and training      0.0 s" in text, "a barrier stands between them"


def test_a_run_is_played_again_with_the_lengths_that_it_had(tmp_path: Path) -> None:
    run(tmp_path, "--name", "first", "workload.agents.solver.answer.median=20")
    run(tmp_path, "--name", "again", "--from", str(tmp_path / "first"))
    rows = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        for name in ("first", "again")
    ]
    first, again = (row["turn_tokens_p50/solver"] for row in rows)
    assert 0.5 < again / first < 2.0, "the scenario itself has a median of 50"
