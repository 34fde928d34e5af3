"""The second pass leaves out what was seen to compute for long with values alone, and nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import second_pass
from tests.cpu_seconds import CpuSecondsPlugin
from tests.second_pass import SecondPassPlugin

second_pass.COSTLY_S = 0.1

def pytest_configure(config):
    cpu_seconds = CpuSecondsPlugin(config)
    config.pluginmanager.register(cpu_seconds)
    config.pluginmanager.register(SecondPassPlugin(config, cpu_seconds))
"""
COMPUTES = """
import time

def compute():
    end = time.process_time() + 0.2
    while time.process_time() < end: pass

def test_costly(): compute()
def test_cheap(): pass
"""
WORLD = {
    "process": "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)",
    "fork": "import os; child = os.fork(); child or os._exit(0); os.waitpid(child, 0)",
    "socket": "import socket; socket.socket().close()",
    "loop": "import asyncio; asyncio.run(asyncio.sleep(0))",
    "thread": "import threading; one = threading.Thread(target=print); one.start(); one.join()",
}


def passed(folder: Path, processes: int, second: str) -> set[str]:
    """The tests that a session on ``folder`` runs, as "file::test"."""
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "scripts" / "src"))
    options = (
        f"-c {os.devnull} -rp --dist loadfile --numprocesses {processes} -o cache_dir={folder / 'cache'}"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options.split(), "--rootdir", folder, folder],
        env={**os.environ, "PYTHONPATH": paths, "FLEXMARL_SECOND_PASS": second},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ("1 tests were left out that the first pass saw compute" in ended.stdout) == (second == "1")
    return set(re.findall(r"^PASSED (?:\S*/)?(\S+)", ended.stdout, re.MULTILINE))


@pytest.mark.parametrize("processes", [0, 2])
def test_costly_tests_of_values_run_once(processes: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_values.py").write_text(COMPUTES)
    for name, line in WORLD.items():
        (tmp_path / f"test_{name}.py").write_text(f"{COMPUTES}\ndef test_world():\n    {line}\n")
    tests = {f"test_{name}.py::test_{test}" for name in WORLD for test in ("costly", "cheap", "world")}
    tests |= {"test_values.py::test_costly", "test_values.py::test_cheap"}
    assert passed(tmp_path, processes, second="") == tests
    assert passed(tmp_path, processes, second="1") == tests - {"test_values.py::test_costly"}
    if processes == 0:
        assert passed(tmp_path, processes, second="") == tests, (
            "the record leaves nothing out of a first pass"
        )
