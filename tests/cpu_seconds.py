"""CPU seconds of each test file and of the processes that it has started, at the end of a session's output.

A busy machine makes a test slow, and hardly costly: these figures can be compared between machines that share their
cores, and seconds of time can't. ``--durations=N`` shows the N files that cost most, beside pytest's slowest tests.
"""

import os
from collections import defaultdict
from collections.abc import Generator
from operator import itemgetter
from typing import Any

import pytest

from .leftovers import runs_tests
from .warm_process import TEMPLATE

_COLLECTION = "(imports and collection)"


class CpuSecondsPlugin:
    """Counts in each process that runs tests. A process counts when it has ended and its parent has waited for it; the
    template of commands counts all along."""

    def __init__(self, config: pytest.Config) -> None:
        self._shown: int | None = config.getoption("durations")
        self._counts = runs_tests(config)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._before = 0.0
        self.tests: dict[str, float] = {}
        """The seconds of each test that has run in this process, by its id."""

    def _count(self, part: str) -> float:
        times = os.times()
        now = times.user + times.system + times.children_user + times.children_system + TEMPLATE.cpu_seconds()
        seconds, self._before = now - self._before, now
        self._seconds[part] += seconds
        return seconds

    def pytest_collection_finish(self) -> None:
        if self._counts:
            self._count(_COLLECTION)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] = self._count(item.nodeid.partition("::")[0])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of this session has ended."""
        for part, seconds in getattr(node, "workeroutput", {}).get("cpu_seconds", {}).items():
            self._seconds[part] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._shown is None:
            return
        terminalreporter.section(f"{sum(self._seconds.values()):.0f} CPU seconds; by file")
        costly = sorted(self._seconds.items(), key=itemgetter(1), reverse=True)
        for part, seconds in costly[: self._shown or None]:
            terminalreporter.line(f"{seconds:8.1f}  {part}")
