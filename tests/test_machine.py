"""The guard of the machine: tests that would change it fail by their names, and nothing has changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .leftovers import STATUS
from .patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
CONFTEST = """\
from tests.left_out import LeftOutPlugin
from tests.leftovers import LeftoversPlugin
from tests.machine import MachinePlugin

def pytest_configure(config):
    leftovers = LeftoversPlugin(config)
    config.pluginmanager.register(leftovers)
    config.pluginmanager.register(MachinePlugin(config, leftovers))
    config.pluginmanager.register(LeftOutPlugin())
"""
HEADER = """\
import os, pytest, subprocess, sys
from contextlib import suppress
from pathlib import Path

OUTSIDE = Path({outside!r})
"""
# The body of a test, and what its report says of it; None: it passes.
CASES = {
    "a_package_manager": ("subprocess.run(['apt-get', 'update'])", "(call): apt-get update"),
    "a_script_that_calls_one": (
        "subprocess.run(['bash', '-c', 'cd / && (dpkg -i x.deb; true)'], check=True)",
        "(call): dpkg -i x.deb",
    ),
    "one_by_its_path": ("subprocess.run([OUTSIDE / 'apt-get', 'update'])", "outside/apt-get"),
    "pip": ("subprocess.run([sys.executable, '-m', 'pip', 'install', 'x'])", "(call): pip install x"),
    "pip_in_a_script": (
        "subprocess.run(['sh', '-c', '\"$0\" -P -m pip --quiet install x || true', sys.executable])",
        "(call): pip --quiet install x",
    ),
    "npm_in_a_fixture": ("", "(setup): npm install"),
    "a_file": ("(OUTSIDE / 'file').write_text('x')", "open {outside}/file"),
    "a_folder": ("(OUTSIDE / 'folder').mkdir()", "os.mkdir {outside}/folder"),
    "a_removal": ("(OUTSIDE / 'apt-get').unlink()", "os.remove {outside}/apt-get"),
    "a_file_moved_away": (
        "(tmp_path / 'x').touch(); (tmp_path / 'x').rename(OUTSIDE / 'moved')",
        "os.rename {outside}/moved",
    ),
    "an_error_that_is_caught": (
        "with suppress(Exception): os.open(OUTSIDE / 'caught', os.O_CREAT)",
        "open {outside}/caught",
    ),
    "files_in_the_folders_of_the_session": (
        "(tmp_path / 'x').write_text('x'); (tmp_path / 'x').unlink(); (OUTSIDE / 'apt-get').read_text()",
        None,
    ),
    "a_program_of_the_test": (
        "(tmp_path / 'apt-get').symlink_to('/bin/true')\n"
        "    path = f'{tmp_path}:' + os.environ['PATH']\n"
        "    subprocess.run(['sh', '-c', 'apt-get update'], env={**os.environ, 'PATH': path}, check=True)",
        None,
    ),
    "the_home_of_the_session": ("assert Path.home() != OUTSIDE", None),
}  # fmt: skip


def session(folder: Path, source: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """A session of pytest on one file, with a home of its own."""
    tests, outside = folder / "tests", folder / "outside"
    for path in (tests, outside, folder / "temporary"):
        path.mkdir()
    (outside / "apt-get").write_text("#!/bin/sh\ntouch ${0%/*}/called\n")
    (outside / "apt-get").chmod(0o755)
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "test_x.py").write_text(HEADER.format(outside=str(outside)) + source)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "scripts" / "src"))),
        "HOME": str(outside),
        "TMPDIR": str(folder / "temporary"),
        "PYTEST_DEBUG_TEMPROOT": str(folder / "temporary"),
    }
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    return subprocess.run(
        [*command, "--rootdir", tests, *options, tests],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("processes", [0, 2])
def test_a_change_of_the_machine_fails_its_test(processes: int, tmp_path: Path) -> None:
    source = "@pytest.fixture\ndef npm(): subprocess.run(['npm', 'install'])\n"
    for name, (body, _) in CASES.items():
        fixture = ", npm" if "fixture" in name else ""
        source += f"def test_{name}(tmp_path{fixture}):\n    {body or 'pass'}\n"
    ended = session(tmp_path, source, "--numprocesses", str(processes))
    failed = {
        line.split("::test_")[1].split()[0]
        for line in ended.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    }
    assert failed == {name for name, (_, change) in CASES.items() if change}, ended.stdout + ended.stderr
    outside = tmp_path / "outside"
    for name, (_, change) in CASES.items():
        if change is not None:
            assert any(
                f"::test_{name} " in line and line.endswith(change.replace("{outside}", str(outside)))
                for line in ended.stdout.splitlines()
            ), f"{name}\n{ended.stdout}"
    assert [path.name for path in outside.iterdir()] == ["apt-get"], "nothing has happened"


def test_a_folder_in_the_home_of_the_session_fails_it(tmp_path: Path) -> None:
    """A program that a test starts would make it in the user's."""
    ended = session(tmp_path, "def test_x(): subprocess.run('mkdir ~/.flexmarl', shell=True, check=True)\n")
    assert ended.returncode == STATUS
    assert "1 passed" in ended.stdout
    assert "the tests left these behind" in ended.stdout and "/home/.flexmarl\n" in ended.stdout


def test_the_session_says_what_it_left_out(tmp_path: Path) -> None:
    source = """\
@pytest.mark.parametrize("number", range(3))
def test_c(number): pytest.skip("no program here")
@pytest.mark.skipif(True, reason="no other here")
def test_d(): ...
def test_e(): ...
"""
    ended = session(tmp_path, source)
    _, _, left_out = ended.stdout.partition("= left out =")
    assert "\n1 test: no other here\n3 tests: no program here\n" in left_out
    assert ended.returncode == 0, ended.stdout + ended.stderr
