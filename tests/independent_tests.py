"""Hands the tests of some files to pytest's processes one by one; those of the other files stay together.

With ``--dist=loadfile`` a file is a process's as a whole: its fixtures are made once. A file that takes minutes, most
of them in waits, would keep one process at work when the others have ended, on cores that are free.
"""

from typing import Any, Final

import pytest

INDEPENDENT: Final = {
    "tests/launch/simulate/chaos/test_chaos_seeds.py",
    "tests/launch/test_restarts.py",
    "tests/launch/test_run_ends.py",
    "tests/launch/test_stall_deadlines.py",
    "tests/launch/test_stalls.py",
    "tests/test_docs.py",
}
"""Files whose tests take long, and share nothing that takes long to make."""


class IndependentTestsPlugin:
    """In the process that hands out the tests (pytest-xdist)."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> object:
        if config.getoption("dist") != "loadfile":
            return None
        from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

        class Scheduling(LoadFileScheduling):  # type: ignore[misc]
            def _split_scope(self, nodeid: str) -> str:
                file: str = super()._split_scope(nodeid)
                return nodeid if file in INDEPENDENT else file

        return Scheduling(config, log)
