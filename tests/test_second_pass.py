"""The second pass leaves out what was seen to compute for long with values alone, and nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .patience import PATIENCE_S
from .processes import FEW_PLUGINS
from .second_pass import costly_tests

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import second_pass
from tests.cpu_seconds import CpuSecondsPlugin
from tests.second_pass import SecondPassPlugin

second_pass.COSTLY_S, second_pass.REPEATED_S = 0.1, 0.02

def pytest_configure(config):
    cpu_seconds = CpuSecondsPlugin(config)
    config.pluginmanager.register(cpu_seconds)
    config.pluginmanager.register(SecondPassPlugin(config, cpu_seconds))
"""
COMPUTES = """
import time
import pytest

def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass

def test_costly(): compute(0.12)
"""
VALUES = f"""{COMPUTES}
def test_alone(): compute(0.03)
@pytest.mark.parametrize("seconds", [0.06, 0.03, 0.0])
def test_cases(seconds): compute(seconds)
"""
WORLD = {
    "process": "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)",
    "fork": "import os; child = os.fork(); child or os._exit(0); os.waitpid(child, 0)",
    "socket": "import socket; socket.socket().close()",
    "loop": "import asyncio; asyncio.run(asyncio.sleep(0))",
    "thread": "import threading; one = threading.Thread(target=print); one.start(); one.join()",
}


def run(folder: Path, processes: int, second: str = "", *options: str) -> tuple[set[str], str]:
    """The tests of ``folder`` that a session sees pass, as "file::test", and its output."""
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "scripts" / "src"))
    usual = f"-c {os.devnull} -rp --dist loadfile --numprocesses {processes} -o cache_dir={folder / 'cache'}"
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *usual.split(), *options, "--rootdir", folder, folder],
        env={**os.environ, **FEW_PLUGINS, "PYTHONPATH": paths, "FLEXMARL_SECOND_PASS": second},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr  # 1: tests have failed
    return set(re.findall(r"^PASSED (?:\S*/)?(\S+)", ended.stdout, re.MULTILINE)), ended.stdout


def passed(folder: Path, processes: int, second: str) -> set[str]:
    tests, output = run(folder, processes, second)
    assert ("3 tests were left out that the first pass saw compute" in output) == (second == "1")
    return tests


@pytest.mark.parametrize("processes", [0, 2])
def test_costly_tests_of_values_run_once(processes: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_values.py").write_text(VALUES)
    for name, line in WORLD.items():
        (tmp_path / f"test_{name}.py").write_text(f"{COMPUTES}\ndef test_world():\n    {line}\n")
    tests = {f"test_{name}.py::test_{test}" for name in WORLD for test in ("costly", "world")}
    left_out = {f"test_values.py::test_{test}" for test in ("costly", "cases[0.06]", "cases[0.03]")}
    tests |= left_out | {"test_values.py::test_alone", "test_values.py::test_cases[0.0]"}
    assert passed(tmp_path, processes, second="") == tests
    assert passed(tmp_path, processes, second="1") == tests - left_out
    if processes == 0:
        assert passed(tmp_path, processes, second="") == tests, (
            "the record leaves nothing out of a first pass"
        )


def test_the_cheapest_case_of_a_function_stays_unless_it_is_costly_itself() -> None:
    seconds = {"f::a[x]": 0.3, "f::a[y]": 0.2, "f::b[x]": 2.0, "f::b[y]": 3.0, "f::c": 0.9, "f::d[x]": 0.05}
    assert costly_tests(seconds) == {"f::a[x]", "f::b[x]", "f::b[y]"}


def test_a_second_try_of_one_test_records_nothing_that_its_file_keeps_in(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    again = tmp_path / "again"
    world = f"def test_world(): {WORLD['socket']}"
    fails_first = (
        f"def test_twice():\n    compute(0.12)\n    assert __import__('os').path.exists({str(again)!r})"
    )
    (tmp_path / "test_file.py").write_text(f"{COMPUTES}\n{world}\n{fails_first}\n")
    tests = {f"test_file.py::test_{name}" for name in ("costly", "world")}
    assert run(tmp_path, 0)[0] == tests
    again.touch()
    assert run(tmp_path, 0, "", "--last-failed")[0] == {"test_file.py::test_twice"}
    assert run(tmp_path, 0, "1")[0] == {*tests, "test_file.py::test_twice"}
