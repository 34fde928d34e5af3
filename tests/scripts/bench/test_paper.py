"""``scripts/bench/run paper`` on a scenario that takes seconds."""

import json
from pathlib import Path

import pytest

from flexmarl.launch.simulate.baselines import BASELINES
from scripts.bench import paper as bench
from scripts.bench import paper_results
from scripts.bench.commands import main
from scripts.bench.paper import Options, tables
from scripts.bench.paper_cases import Case

from ...bench_tables import drawn

SCENARIO = Path(__file__).parents[2] / "launch" / "simulate" / "scenario.yaml"


def test_each_mode_has_its_seconds_and_its_ratio_to_the_papers_system(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["paper", "--json", "--scenario", str(SCENARIO), "training.steps=1"]) == 0
    result = json.loads(capsys.readouterr().out)
    modes = result[str(SCENARIO)]
    assert [*modes] == [*BASELINES] and modes["flexmarl-paper"]["ratio"] == 1.0
    for figures in modes.values():
        assert figures["step_s"] > 0.0 and figures["paper_s"] is None
        assert figures["ratio"] == pytest.approx(
            figures["step_s"] / modes["flexmarl-paper"]["step_s"], rel=1e-2
        )
    assert "without-balancing" in drawn(tables, result)


def test_results_that_a_file_has_from_the_same_code_are_not_played_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Case] = []

    def play(case: Case) -> dict[str, float]:
        played.append(case)
        return {"step_s": 8.0 + len(played), "tokens_per_s": 100.0}

    monkeypatch.setattr(bench, "play", play)
    call = ["paper", "--json", "--scenario", str(SCENARIO), "--keep", str(tmp_path / "results.jsonl")]
    assert main([*call, "--mode", "marti", "--rounds", "2"]) == 0
    assert [(case.mode, case.seed) for case in played] == [("marti", 2048), ("marti", 2049)]
    assert json.loads(capsys.readouterr().out)[str(SCENARIO)]["marti"]["step_s"] == 9.5
    assert main([*call, "--mode", "marti", "--mode", "flexmarl"]) == 0
    assert [(case.mode, case.seed) for case in played[2:]] == [("flexmarl", 2048)]
    modes = json.loads(capsys.readouterr().out)[str(SCENARIO)]
    assert modes["marti"]["step_s"] == 9.0 and modes["marti"]["ratio"] is None, "nothing to compare with"
    monkeypatch.setattr(paper_results, "code_digest", lambda: "other code")
    assert main([*call, "--mode", "marti"]) == 0
    assert len(played) == 4 and len((tmp_path / "results.jsonl").read_text().splitlines()) == 3


def test_the_cases_are_those_of_the_options() -> None:
    assert len(Options(rounds=2).cases()) == 2 * 2 * len(BASELINES)
    of_page = Options(
        scenarios=("fleet-5x32b", "merchant-assistant"), modes=("marti", "flexmarl"), rounds=9, page=True
    )
    cases = [(case.scenario, case.mode, case.seed) for case in of_page.cases()]
    assert ("fleet-5x32b", "flexmarl", 2048) in cases and ("merchant-assistant", "marti", 2050) in cases
    assert len(cases) == 7, "the fleets have one seed, and no marti"


def test_wrong_options_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for options, problem in (
        (["--scenario", str(SCENARIO), "balance.scope=everything"], "balance.scope"),
        (["--page", "training.steps=1"], "--page has cases of its own"),
        (["--page", "--scenario", "fleet-5x32b", "--mode", "marti"], "--page has no case"),
    ):
        assert main(["paper", *options]) == 2
        assert problem in capsys.readouterr().err
