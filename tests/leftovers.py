"""Folders of one test session, which must be empty when it ends: nothing may stay in /dev/shm or /tmp.

Other sessions may run at the same time. Each has its own folder for temporary files (``TMPDIR``) and its own for the
directories of runs (``FLEXMARL_RUNTIME_BASE``), also in the processes that it starts. The folders of a session that was
killed are removed by the next one: their names have its process id.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from flexmarl.launch.hosts import env

_PREFIX = "flexmarl-test-session-"
_CACHE = Path(__file__).parents[1] / ".cache"

STATUS: Final = 7
"""Ends a session that leaves something, also if tests have failed. pytest has no such status: ``scripts/test`` tries
failed tests once more, which would pass and hide these files."""


class SessionFolders:
    """Made when the session begins, and removed with all that is in them when it ends."""

    def __init__(self) -> None:
        # pytest's own folders, of which it keeps those of failed tests, stay in their usual place.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        runtime, temporary = (
            session_folder(base) for base in (env.runtime_base(), Path(tempfile.gettempdir()))
        )
        os.environ.update(FLEXMARL_RUNTIME_BASE=runtime, TMPDIR=temporary)
        # torch keeps a cache in TMPDIR otherwise.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "torchinductor"))
        tempfile.tempdir = temporary
        self._folders = Path(runtime), Path(temporary)

    def close(self) -> list[str]:
        """The files and folders that were left."""
        left = [str(path) for folder in self._folders for path in sorted(folder.iterdir())]
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        return left


def runs_tests(config: pytest.Config) -> bool:
    """Return False for the process that hands the tests to others (pytest-xdist)."""
    return config.getoption("dist", "no") == "no" or hasattr(config, "workerinput")


def session_folder(base: Path) -> str:
    """A new folder of this session; those of sessions that were killed are removed."""
    for folder in base.glob(f"{_PREFIX}*"):
        if not psutil.pid_exists(int(folder.name.removeprefix(_PREFIX).partition("-")[0])):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base)


class LeftoversPlugin:
    """Fails a session that leaves something. Of the processes of one session (pytest-xdist) each has its own folders:
    nested ones would have paths too long for sockets."""

    def __init__(self, config: pytest.Config) -> None:
        self._folders = SessionFolders() if runs_tests(config) else None
        self._left: list[str] = []

    def add(self, left: Iterable[str]) -> None:
        """Count these among what was left; before the session ends."""
        self._left += left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of this session has ended."""
        self._left += getattr(node, "workeroutput", {}).get("left", ())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._folders is not None:
            self._left += self._folders.close()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left"] = self._left
        complete = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._left and session.exitstatus in complete:
            session.exitstatus = STATUS
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if self._left and reporter is not None:
            reporter.write_line("")
            reporter.section("the tests left these behind", red=True)
            for path in self._left:
                reporter.line(path)
