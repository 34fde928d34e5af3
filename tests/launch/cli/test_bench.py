"""``flexmarl bench calls`` as a command, with small counts: its figures mean nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexmarl.launch.bench.call_tables import tables
from flexmarl.launch.cli.main import main

from ...bench_tables import drawn
from ...patience import PATIENCE_S

_SOURCES = Path(__file__).parents[3] / "scripts" / "src"
_PROGRAM = "import sys; from flexmarl.launch.cli.main import main; sys.exit(main())"
_TINY = ("--rounds=2", "--seconds=0.04", "--in-flight=20", "--callers=2", "--array-mib=1", "--no-others")
_KEYS = {
    "call_p50_us", "call_p99_us", "bare_p50_us", "bare_p99_us", "calls_per_s", "bare_calls_per_s",
    "oneway_per_s", "fan_in_calls_per_s", "array_gb_s", "bare_array_gb_s",
    "dict_p50_us", "dict_p99_us", "bare_dict_p50_us", "bare_dict_p99_us",
    "gathered_calls_per_s", "gathered_1k_calls_per_s",
    "best_bare_p50_us", "best_bare_calls_per_s", "best_bare_oneway_per_s",
    "spawn_first_reply_s", "idle_rss_mib", "idle_cpu_percent", "kill_to_dead_ms",
}  # fmt: skip


def _start(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, "bench", "calls", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(_SOURCES)},
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def run() -> Iterator[tuple[dict[str, Any], str]]:
    """The JSON object, and the text on standard error."""
    process = _start("--json", *_TINY)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        yield json.loads(out), err  # nothing else on standard output, or this raises
    finally:
        process.kill()


@pytest.mark.parametrize("transport", ["ipc", "tcp_curve"])
def test_every_figure_is_there_and_possible(run: tuple[dict[str, Any], str], transport: str) -> None:
    figures = run[0][transport]
    assert figures.keys() == {*_KEYS, "rounds", "goals"}
    for key in _KEYS:
        assert len(figures["rounds"][key]) == 2
        # A busy machine may take any time.
        if key.endswith("_us"):
            assert 5 < figures[key] < 1e6 * PATIENCE_S, key
        elif key.endswith("per_s"):
            assert 0 < figures[key] < 1e8, key
        elif key.endswith("gb_s"):
            assert 0 < figures[key] < 100, key
    assert figures["call_p50_us"] <= figures["call_p99_us"]
    assert 0.05 < figures["spawn_first_reply_s"] < PATIENCE_S
    assert 5 < figures["idle_rss_mib"] < 500
    assert all(isinstance(goal["met"], bool) for goal in figures["goals"])


def test_what_was_measured_where_is_said(run: tuple[dict[str, Any], str]) -> None:
    result, err = run
    assert result["settings"]["rounds"] == 2
    assert result["machine"]["cpus"] >= 1
    assert 0 <= result["machine"]["busy_percent"] <= 100
    assert {"flexmarl", "libzmq", "pyzmq"} <= result["versions"].keys()
    assert result["others"] == {}
    lines = [line for line in err.splitlines() if ", round " in line]
    assert lines[0] == "ipc: calls, round 1 of 2" and lines[-1] == "tcp_curve: start, round 2 of 2"
    assert len(lines) == 16


def test_tables(run: tuple[dict[str, Any], str]) -> None:
    result = {**run[0], "machine": {**run[0]["machine"], "busy_percent": 31.4}}
    result["others"] = {
        "ray": None,
        "mars": {"error": "no air"},
        "xoscar": {"version": "1.2", "call_p50_us": 200.0, "call_p99_us": 300.0, "calls_per_s": 13_800.0,
                   "start_first_reply_s": 2.0},
    }  # fmt: skip
    text = drawn(tables, result)
    for words in (
        "TCP with CURVE",
        "empty call, p50",
        "<= 1.5x bare",
        "xoscar 1.2",
        "13.8k",
        "not installed: ray (pip install flexmarl[bench])",
        "mars: no air",
        "31 % busy",
    ):
        assert words in text
    assert text.count("met") == sum(len(result[transport]["goals"]) for transport in ("ipc", "tcp_curve"))


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = _start("--only=ipc", "--rounds=1000", *_TINY[1:])
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "how busy the machine is with other things\n"
        assert process.stderr.readline() == "ipc: calls, round 1 of 1000\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 5  # three bare peers, our actor, and the process that has forked it
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "flexmarl: stopped" in err and "Traceback" not in err and not out
    gone, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive and len(gone) == 5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--only=udp"], "'udp' is not one of"),
        (["--rounds=0"], "0 is not in the range"),
        (["--seconds=0"], "0.0 is not in the range"),
        (["--array-mib=0"], "0 is not in the range"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], words: list[str], problem: str) -> None:
    assert main(["bench", "calls", *words]) == 2
    assert problem in capsys.readouterr().err


def test_help_shows_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "calls", "--help"]) == 0
    assert "flexmarl bench calls --json > calls.json" in capsys.readouterr().out
