"""The second pass runs the cheapest tests of each file, and a session may have an end."""

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
from tests.deadline import DeadlinePlugin
from tests.second_pass import SecondPassPlugin

second_pass.FILE_S = 0.1

def pytest_configure(config):
    cpu_seconds = CpuSecondsPlugin(config)
    for plugin in (cpu_seconds, SecondPassPlugin(cpu_seconds), DeadlinePlugin()):
        config.pluginmanager.register(plugin)
"""
COMPUTES = """
import time
import pytest

def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
"""
VALUES = f"""{COMPUTES}
def test_costly(): compute(0.2)
@pytest.mark.parametrize("seconds", [0.08, 0.05, 0.0])
def test_cases(seconds): compute(seconds)
"""
PROCESS = f"""{COMPUTES}
import subprocess, sys
def test_process(): subprocess.run([sys.executable, "-c", ""], check=True); compute(0.12)
def test_costly(): compute(1.2)
"""


def run(folder: Path, processes: int = 0, **environment: str) -> tuple[set[str], str]:
    """The tests of ``folder`` that a session sees pass, as "file::test", and its output."""
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "scripts" / "src"))
    usual = f"-c {os.devnull} -rp --dist loadfile --numprocesses {processes} -o cache_dir={folder / 'cache'}"
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *usual.split(), "--rootdir", folder, folder],
        env={
            **os.environ,
            **FEW_PLUGINS,
            "PYTHONPATH": paths,
            "FLEXMARL_SECOND_PASS": "",
            "FLEXMARL_TESTS_END": "inf",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return set(re.findall(r"^PASSED (?:\S*/)?(\S+)", ended.stdout, re.MULTILINE)), ended.stdout


@pytest.mark.parametrize("processes", [0, 2])
def test_the_cheapest_tests_of_each_file_run_again(processes: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_values.py").write_text(VALUES)
    (tmp_path / "test_process.py").write_text(PROCESS)
    cheap = {
        "test_values.py::test_cases[0.0]",
        "test_values.py::test_cases[0.05]",
        "test_process.py::test_process",
    }
    costly = {
        "test_values.py::test_cases[0.08]",
        "test_values.py::test_costly",
        "test_process.py::test_costly",
    }
    tests, output = run(tmp_path, processes)
    assert tests == cheap | costly and "left out" not in output
    tests, output = run(tmp_path, processes, FLEXMARL_SECOND_PASS="1")
    assert tests == cheap and "3 tests were left out: of each file the cheapest" in output
    if processes == 0:
        assert run(tmp_path)[0] == cheap | costly, "the record leaves nothing out of a first pass"


def test_the_cheapest_test_of_a_file_stays_unless_it_is_very_costly() -> None:
    seconds = {
        "f::a": 1.6,
        "f::b[x]": 0.3,
        "f::b[y]": 0.2,
        "g::a": 3.0,
        "g::b": 4.0,
        "h::a": 5.1,
        "i::a": 1.9,
    }
    assert costly_tests(seconds) == {"f::a", "g::b", "h::a"}


def test_tests_after_the_end_of_a_session_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_file.py").write_text("def test_a(): pass\n")
    assert run(tmp_path, FLEXMARL_TESTS_END="9e9")[0] == {"test_file.py::test_a"}
    tests, output = run(tmp_path, FLEXMARL_TESTS_END="1")
    assert not tests and "1 skipped" in output
