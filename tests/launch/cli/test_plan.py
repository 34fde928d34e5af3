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


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "missing/best.yaml",
            "missing/best.yaml can't be written: No such file or directory; --write names another",
        ),
        ("/proc/best.yaml", "/proc/best.yaml can't be written: .*; --write names another file"),
        ("x" * 300, "x can't be written: File name too long; --write names another file"),
    ],
)
def test_a_file_that_can_not_be_written_is_refused_before_the_search(
    tmp_path: Path, target: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(plan, [str(SCENARIO), "--write", str(tmp_path / target)], catch_exceptions=False)
    assert not any(tmp_path.iterdir())
