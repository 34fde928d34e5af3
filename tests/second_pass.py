"""Leaves the costly tests of each file out of a second pass, which has another Python and fewer programs.

Each session records the CPU seconds of its tests in pytest's cache. With ``FLEXMARL_SECOND_PASS=1`` a session runs, of
each file, the cheapest tests that take ``FILE_S`` together, at least one if that takes no more than ``TEST_S``: modules
are imported and their common paths run with the other Python, in a tenth of the time. The costly tests are whole runs,
and further values: they try more of flexmarl, not more of Python. Nobody keeps a list of them.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import pytest

from .cpu_seconds import CpuSecondsPlugin

FILE_S: Final = 2.0
TEST_S: Final = 5.0
RECORD: Final = "flexmarl/cpu_seconds"
"""Key in pytest's cache: the CPU seconds of each test, by its id."""


class SecondPassPlugin:
    """Records in the process that hands tests out; leaves recorded tests out in each process that runs tests."""

    def __init__(self, cpu_seconds: CpuSecondsPlugin) -> None:
        self._second = os.environ.get("FLEXMARL_SECOND_PASS") == "1"
        self._seconds = cpu_seconds.tests
        """Those of this process's tests; in the process that hands tests out, of all."""
        self._left_out = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self._second:
            return
        costly = costly_tests(_record(config))
        left_out = [item for item in items if item.nodeid in costly]
        self._left_out = len(left_out)
        items[:] = [item for item in items if item.nodeid not in costly]
        config.hook.pytest_deselected(items=left_out)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput.update(test_seconds=self._seconds, left_out=self._left_out)
        elif not self._second and (cache := getattr(session.config, "cache", None)) is not None:
            seconds = {test: round(seconds, 3) for test, seconds in self._seconds.items()}
            cache.set(RECORD, {**_record(session.config), **seconds})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of this session has ended; all of them have left the same tests out."""
        output = getattr(node, "workeroutput", {})
        self._seconds.update(output.get("test_seconds", {}))
        self._left_out = max(self._left_out, output.get("left_out", 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.line(
                f"{self._left_out} tests were left out: of each file the cheapest have run, {FILE_S:g} CPU s together"
            )


def costly_tests(seconds: Mapping[str, float]) -> set[str]:
    """The tests that a second pass leaves out, by the CPU seconds of all tests."""
    files: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for test, costs in seconds.items():
        files[test.partition("::")[0]].append((costs, test))
    costly = set()
    for tests in files.values():
        total = 0.0
        for index, (costs, test) in enumerate(sorted(tests)):
            total += costs
            if costs > TEST_S or (index > 0 and total > FILE_S):
                costly.add(test)
    return costly


def _record(config: pytest.Config) -> dict[str, float]:
    cache = getattr(config, "cache", None)  # with -p no:cacheprovider there is none
    return (None if cache is None else cache.get(RECORD, None)) or {}
