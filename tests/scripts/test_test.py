"""``scripts/test`` runs a test that has failed once more, alone, if FLEXMARL_SECOND_TRY is set, and names it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..leftovers import STATUS

ROOT = Path(__file__).parents[2]
LIB = """
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P) venv_python=$PYTHON_OF_TESTS
install() { :; }
say() { printf '%s\\n' "$@" >&2; }
"""
CASES = """
import os, pathlib

def test_that_passes_from_the_second_time_on():
    ran = pathlib.Path("ran").exists()
    pathlib.Path("ran").touch()
    assert ran

def test_that_passes():
    pass
"""
DEFECT = """
def test_that_never_passes():
    assert False
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts" / "test")
    (tmp_path / "scripts" / "lib.sh").write_text(LIB)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    return tmp_path


def run(checkout: Path, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [checkout / "scripts" / "test", "--numprocesses=2", "--dist=loadfile", "."],
        env={**os.environ, "PYTHON_OF_TESTS": sys.executable, "FLEXMARL_SECOND_TRY": "", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def test_a_test_that_passes_at_the_second_try_is_named_and_no_failure(checkout: Path) -> None:
    status, output = run(checkout, FLEXMARL_SECOND_TRY="1")
    assert status == 0
    first, second = output.split("once more")
    assert "FAILED test_cases.py::test_that_passes_from_the_second_time_on" in first
    assert "PASSED test_cases.py::test_that_passes_from_the_second_time_on" in second
    assert "test_that_passes " not in second, "only those that have failed run again"


def test_a_defect_fails_the_second_time_too(checkout: Path) -> None:
    (checkout / "test_defect.py").write_text(DEFECT)
    status, output = run(checkout, FLEXMARL_SECOND_TRY="1")
    assert status == 1 and output.count("FAILED test_defect.py::test_that_never_passes") == 2


def test_a_failure_does_not_hide_what_the_tests_have_left(checkout: Path) -> None:
    """A second try of the one test would leave nothing."""
    (checkout / "conftest.py").write_text(
        "from tests.leftovers import LeftoversPlugin\n"
        "def pytest_configure(config): config.pluginmanager.register(LeftoversPlugin(config))\n"
    )
    (checkout / "test_leaver.py").write_text("import tempfile\ndef test_that_leaves(): tempfile.mkstemp()\n")
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "scripts" / "src"))
    status, output = run(checkout, FLEXMARL_SECOND_TRY="1", PYTHONPATH=paths)
    assert status == STATUS, output
    assert "the tests left these behind" in output and "once more" not in output


def test_a_person_gets_the_first_result(checkout: Path) -> None:
    status, output = run(checkout)
    assert status == 1 and "once more" not in output


def test_tests_that_cannot_be_collected_fail(checkout: Path) -> None:
    (checkout / "test_defect.py").write_text("import nothing_of_that_name")
    status, _ = run(checkout, FLEXMARL_SECOND_TRY="1")
    assert status
