"""``scripts/bench/run paper`` on a scenario that takes seconds."""

import json
from pathlib import Path

import pytest

from flexmarl.launch.simulate.baselines import BASELINES
from scripts.bench.commands import main
from scripts.bench.paper import PAPER_S, Options, parts, tables

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


def test_the_papers_seconds_have_its_ratios() -> None:
    merchant = PAPER_S["merchant-assistant"]
    assert round(merchant["mas-rl"] / merchant["flexmarl-paper"], 2) == 7.25
    assert all(mode in BASELINES for modes in PAPER_S.values() for mode in modes)
    assert parts(Options(rounds=2)) == 2 * 2 * len(BASELINES)


def test_wrong_overrides_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--scenario", str(SCENARIO), "balance.scope=everything"]) == 2
    assert "balance.scope" in capsys.readouterr().err
