"""The command ``flexmarl plan``."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.cli.plan import plan
from flexmarl.launch.cli.simulate import simulate

SCENARIO = Path(__file__).parents[1] / "simulate" / "scenario.yaml"


def test_the_scenario_that_it_writes_has_the_seconds_that_it_says(tmp_path: Path) -> None:
    target = tmp_path / "best.yaml"
    words = [
        str(SCENARIO),
        "mode=sync",
        "--budget",
        "4 devices",
        "--simulations",
        "2",
        "--write",
        str(target),
    ]
    done = CliRunner().invoke(plan, [*words, "--json"], catch_exceptions=False)
    result = json.loads(done.stdout)
    assert len(result["simulated"]) == 2 and result["scenario"] == str(target)
    assert result["simulated"][0]["step_s"] <= result["simulated"][1]["step_s"]
    assert "1 of at most 2" in done.stderr
    again = CliRunner().invoke(
        simulate, [str(target), "--runs", str(tmp_path), "--name", "best", "--json"], catch_exceptions=False
    )
    assert json.loads(again.output)["step_s"] == result["step_s"]


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    target = tmp_path / "best.yaml"
    target.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        CliRunner().invoke(plan, [str(SCENARIO), "--write", str(target)], catch_exceptions=False)
    assert target.read_text() == "mine"


def test_a_place_where_nothing_can_be_written_is_refused_before_the_search(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "best.yaml"
    with pytest.raises(
        ConfigError, match="missing is not a folder in which you may write; --write names another"
    ):
        CliRunner().invoke(plan, [str(SCENARIO), "--write", str(target)], catch_exceptions=False)
