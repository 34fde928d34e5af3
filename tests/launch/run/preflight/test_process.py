"""The process of the checks: its reports while they take long, and its end without a reader."""

import json
import os
import threading
from pathlib import Path

import pytest

from flexmarl.launch.run.preflight import process

from ....patience import PATIENCE_S


class Ended(Exception):
    pass


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(process, "_REPORT_S", 0.001)
    monkeypatch.setattr(os, "_exit", end)


def test_places_are_lines_of_json_until_nobody_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "lines_of_threads", lambda folder: ["workflow.py:3, in f: g()", str(folder)])
    reader, writer = os.pipe()
    statuses: list[int] = []

    def report() -> None:
        try:
            process._report_places(tmp_path, findings, threading.Lock())
        except Ended as ended:
            statuses.append(ended.args[0])

    findings = os.fdopen(writer, "w")
    thread = threading.Thread(target=report, daemon=True)
    with os.fdopen(reader) as lines:
        thread.start()
        for _ in range(2):
            assert json.loads(lines.readline()) == {"at": f"workflow.py:3, in f: g(); {tmp_path}"}
    thread.join(PATIENCE_S)
    assert statuses == [1]
    with pytest.raises(BrokenPipeError):
        findings.close()  # the line that was not written
