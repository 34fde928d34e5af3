"""Leaves tests out of a second pass with another Python: those that compute for long, and with values alone.

A pass records the CPU seconds of tests in pytest's cache: those of files in which no test has started a process or a
thread, or opened a socket, as each loop of asyncio does. Left out are tests that took ``COSTLY_S`` or more; and of the
cases of one function, which differ by their parameters, those that took ``REPEATED_S`` or more, but for the cheapest.
Such tests train models, play storms and simulate runs: they try code with many values, whose cheap tests run with the
other Python all the same. With ``FLEXMARL_SECOND_PASS=1`` a session leaves them out. Nobody keeps a list of them.
"""

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Generator, Mapping
from typing import Any, Final

import pytest

from .cpu_seconds import CpuSecondsPlugin
from .leftovers import runs_tests

COSTLY_S: Final = 1.0
REPEATED_S: Final = 0.1
RECORD: Final = "flexmarl/computed"
"""Key in pytest's cache: ``outside``, the files of tests that have done more than compute, and ``seconds``, those of
tests of other files, by id."""
_OUTSIDE = {
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "socket.__new__", "subprocess.Popen",
}  # fmt: skip
"""Audit events (PEP 578). Python 3.11 has none for threads."""


class SecondPassPlugin:
    """Records in each process that runs tests, or leaves recorded tests out."""

    def __init__(self, config: pytest.Config, cpu_seconds: CpuSecondsPlugin) -> None:
        self._second = os.environ.get("FLEXMARL_SECOND_PASS") == "1"
        self._seconds = cpu_seconds.tests
        """Those of this process's tests; in the process that hands tests out, of all."""
        self._file: str | None = None
        self._outside: set[str] = set()
        """The files of tests that have done more than compute."""
        self._left_out = 0
        if runs_tests(config) and not self._second:
            sys.addaudithook(self._audit)
            self._note_threads()

    def _audit(self, event: str, _: tuple[Any, ...]) -> None:
        if event in _OUTSIDE:
            self._note()

    def _note_threads(self) -> None:
        begin, note = threading.Thread.start, self._note

        def start(self: threading.Thread) -> None:
            note()
            begin(self)

        threading.Thread.start = start  # type: ignore[method-assign]

    def _note(self) -> None:
        if self._file is not None:
            self._outside.add(self._file)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self._second:
            return
        recorded = costly_tests(_record(config)["seconds"])
        left_out = [item for item in items if item.nodeid in recorded]
        self._left_out = len(left_out)
        items[:] = [item for item in items if item.nodeid not in recorded]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._file = _file_of(item.nodeid)
        try:
            return (yield)
        finally:
            self._file = None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput.update(
                outside=[*self._outside], test_seconds=self._seconds, left_out=self._left_out
            )
        elif not self._second and (cache := getattr(session.config, "cache", None)) is not None:
            # The session may try some tests of a file once more, which the others of the file have kept in.
            before = _record(session.config)
            outside = self._outside.union(before["outside"])
            seconds = {
                test: round(taken, 3)
                for test, taken in {**before["seconds"], **self._seconds}.items()
                if _file_of(test) not in outside
            }
            cache.set(RECORD, {"outside": sorted(outside), "seconds": seconds})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of this session has ended; all of them have left the same tests out."""
        output = getattr(node, "workeroutput", {})
        self._outside |= set(output.get("outside", ()))
        self._seconds.update(output.get("test_seconds", {}))
        self._left_out = max(self._left_out, output.get("left_out", 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.line(
                f"{self._left_out} tests were left out that the first pass saw compute for {COSTLY_S:g} s or more,"
                f" or for {REPEATED_S:g} s with other values"
            )


def costly_tests(seconds: Mapping[str, float]) -> set[str]:
    """The tests that a second pass leaves out, by the CPU seconds of tests that compute alone."""
    functions: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for test, taken in seconds.items():
        functions[test.partition("[")[0]].append((taken, test))
    left_out = set()
    for cases in functions.values():
        cheapest = min(cases)
        left_out |= {case[1] for case in cases if case[0] >= (COSTLY_S if case is cheapest else REPEATED_S)}
    return left_out


def _record(config: pytest.Config) -> dict[str, Any]:
    cache = getattr(config, "cache", None)  # with -p no:cacheprovider there is none
    record: dict[str, Any] | None = None if cache is None else cache.get(RECORD, None)
    return record or {"outside": [], "seconds": {}}


def _file_of(test: str) -> str:
    return test.partition("::")[0]
