"""``flexmarl submit``: a file of logged trajectories. ``test_logged_trajectories.py`` has a run that trains them."""

import json
from pathlib import Path

import pytest

from flexmarl.actors.messages import QueryAnswer
from flexmarl.actors.names import Step
from flexmarl.launch.cli import submit as command
from flexmarl.launch.cli.main import main

ANSWERS = [
    QueryAnswer("a", Step(3), [], 0, ""),
    QueryAnswer("b", Step(4), [], 0, ""),
    QueryAnswer("c", Step(4), [], 0, "late: too old"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def test_a_line_that_is_no_object_is_refused_with_its_number(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, words in (("{\n", "line 3: it is not JSON"), ("[1]\n", "line 3: it needs an object")):
        file.write_text('{"agent": "solver"}\n\n' + text)
        assert main(["submit", "runs/none", str(file)]) == 2
        assert words in capsys.readouterr().err


def test_what_is_trained_and_dropped_is_shown(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "query_run", lambda run, call: ANSWERS)
    file.write_text('{"answer": "a\u2028b"}\n')
    assert command._lines_of(file) == [{"answer": "a\u2028b"}], "a line ends with a line feed alone"
    assert main(["submit", "runs/first", str(file)]) == 0
    assert capsys.readouterr().out == "2 of 3 groups are trained\n1 dropped: late: too old\n"
    assert main(["submit", "runs/first", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "trained": {"a": 3, "b": 4},
        "dropped": {"c": "late: too old"},
    }
