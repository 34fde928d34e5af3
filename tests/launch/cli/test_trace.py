"""``flexmarl trace``."""

import gzip
import json
from pathlib import Path

import pytest

from flexmarl.launch.cli.main import main

from ..in_process import Finished
from ..monitoring.timeline.test_chrome_trace import check
from .runs import make_run


def test_the_trace_of_a_whole_run_keeps_the_rules_of_the_format(
    undisturbed: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "whole.json.gz"
    assert main(["trace", str(undisturbed.directory), "-o", str(file)]) == 0
    assert f"{file} has " in capsys.readouterr().out
    events = check(json.loads(gzip.decompress(file.read_bytes())))
    flows = {event["name"] for event in events if event["ph"] == "s"}
    assert {"trajectory to turn", "turn to sample", "sample to micro_batch", "publish to install"} <= flows


def test_its_file_has_the_name_of_the_run(
    undisturbed: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", str(undisturbed.directory), "--from-step", "2", "--to-step", "3"]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["whole.trace.json.gz"]


def test_what_can_not_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run").path
    assert main(["trace", str(run)]) == 2
    assert "trace.enabled=true" in capsys.readouterr().err
    assert main(["trace", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert main(["trace", str(run), "--from-step", "3", "--to-step", "2"]) == 2
    assert "--from-step 3 is behind --to-step 2" in capsys.readouterr().err
