"""``scripts/gpu/battery``: each test in a process of its own, whose failure or hang never stops the next."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.gpu import actor_start, end_to_end
from scripts.gpu.command import main
from scripts.gpu.table import FOLDER, TESTS, Row

from ...patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from scripts.gpu import command
from scripts.gpu.table import Row
limit_s, names = int(sys.argv[1]), sys.argv[2].split()
command.TESTS = tuple(Row(name, "tests.scripts.gpu.sample", limit_s, on_cpu=name != "CARD") for name in names)
sys.exit(command.main(sys.argv[3:]))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "src")])}


def battery(names: str, limit_s: int, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """The exit status, the checks that ``--json`` prints, and the progress."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(limit_s), names, "--device", "cpu", "--json", *options],
        env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return ended.returncode, [json.loads(line) for line in ended.stdout.splitlines()], ended.stderr


def test_a_test_that_fails_or_dies_does_not_stop_the_next(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    names = "FAILS RAISES DIES LEFT CARD PASSES"
    status, checks, progress = battery(names, int(PATIENCE_S), "--results", str(page))
    assert status == 1
    seen = {(check["test"], check["name"]): (check["value"], check["passed"]) for check in checks}
    assert seen == {
        ("FAILS", "rate"): (1.0, False),
        ("FAILS", "later"): (1.0, True),
        ("RAISES", "before"): (True, None),
        ("RAISES", "ended"): ("RuntimeError: some reason", False),
        ("DIES", "ended"): ("exit status -9", False),
        ("LEFT", "left out"): ("it needs two cards", None),
        ("CARD", "left out"): ("needs a CUDA device", None),
        ("PASSES", "share"): (0.1235, True),
        ("PASSES", "bytes"): (2_000_000_000, None),
    }
    assert "raise RuntimeError" in progress, "the end of the output of the test"
    text = page.read_text()
    assert "1 passed, 3 failed (FAILS, RAISES, DIES), 2 left out (LEFT, CARD)." in text
    assert "| FAILS | rate | 1 GB/s | >= 2 GB/s | FAILED |" in text
    assert "| PASSES | bytes | 2 GB |  |  |" in text and "torch" in text and "commit" in text
    # Limits of parts grow with those of tests; a second battery has a heading of its own.
    status, (factor, _), _ = battery(
        "SLOW LEFT", int(PATIENCE_S), "--limit-factor", "2.5", "--results", str(page)
    )
    assert (status, factor["value"]) == (0, 2.5)
    assert page.read_text().count("\n## ") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_battery_that_is_ended_has_its_results_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    page = tmp_path / "RESULTS.md"
    words = ["--device", "cpu", "--json", "--results", str(page)]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(int(PATIENCE_S)), "PASSES HANGS", *words],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        children = (check["value"] for check in map(json.loads, process.stdout) if check["name"] == "child")
        child = next(children)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 130
    assert not psutil.pid_exists(child)
    text = page.read_text()
    assert (
        "| PASSES | share | 0.1235 |" in text and "1 passed, 0 failed, 0 left out; stopped in HANGS." in text
    )


def test_a_page_that_can_not_be_written_is_refused_before_the_first_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["T0", "--device", "cpu", "--results", str(tmp_path / "no" / "page.md")]) == 1
    out, err = capsys.readouterr()
    assert "page.md" in err and "T0" not in f"{out}{err}"


def test_a_test_that_hangs_is_killed_with_its_orphans() -> None:
    for limit_s in (1, 4, 16, 64):  # the first check may come late on a busy machine
        status, checks, progress = battery("HANGS", limit_s)
        *before, ended = checks
        assert (status, ended["value"]) == (1, f"killed at its limit of {limit_s} s")
        if before:
            break
    (child,) = before
    assert not psutil.pid_exists(child["value"])
    assert "in _write_checks" in progress, "the stack of the thread that hung"


def test_the_list_names_each_test_with_its_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    text = capsys.readouterr().out
    for row in TESTS:
        assert f"{row.name:4} {row.proves}" in text
        assert row.proves.endswith("."), row
    assert sum(row.limit_s for row in TESTS) < 30 * 60


def test_a_test_with_limits_for_its_parts_ends_before_it_is_killed() -> None:
    limits = {row.module: row.limit_s for row in TESTS}
    assert (
        limits["end_to_end"] - end_to_end.LIMIT_S >= 30 and limits["actor_start"] - actor_start.LIMIT_S >= 15
    )


def test_every_test_has_a_row() -> None:
    files = {path.stem for path in FOLDER.glob("*.py") if "def run(card: Card)" in path.read_text()}
    assert files == {row.module for row in TESTS}
    numbers = [int(row.name.removeprefix("T")) for row in TESTS]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["T99"], "unknown T99; there are: T0"),
        (["--device", "gpu"], "cpu, or a card such as cuda:0"),
        (["T0", "--device", "cuda:77"], "device cuda:77: PyTorch"),
    ],
)
def test_a_wrong_word_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "scripts/gpu/battery T0 T1 T7 T5 T10" in text and "FLEXMARL_PYTHON=python3" in text


def test_the_starter_uses_the_interpreter_that_it_gets(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [FOLDER / "battery", "--list"],
        cwd=tmp_path, env={**environment, "FLEXMARL_PYTHON": sys.executable},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0 and ended.stdout.startswith("T0 "), ended.stderr


def test_a_row_of_another_folder_has_its_whole_name() -> None:
    assert Row("X", "machine", 1).import_name == "scripts.gpu.machine"
    assert Row("X", "tests.scripts.gpu.sample", 1).import_name == "tests.scripts.gpu.sample"
