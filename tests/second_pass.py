"""Leaves tests out of a second pass with another Python: those that compute for long, and with values alone.

A pass records them in pytest's cache: no test of their file has started a process or a thread, or opened a socket, as
each loop of asyncio does, and they took ``COSTLY_S`` or more of CPU time themselves. Such tests train models, play
storms and simulate runs: they try code with many values, whose cheap tests run with the other Python all the same.
With ``FLEXMARL_SECOND_PASS=1`` a session leaves out the tests that the cache names. Nobody keeps a list of them.
"""

import os
import sys
import threading
from collections.abc import Generator
from typing import Any, Final

import pytest

from .cpu_seconds import CpuSecondsPlugin
from .leftovers import runs_tests

COSTLY_S: Final = 1.0
RECORD: Final = "flexmarl/second-pass"
"""Key in pytest's cache: ``outside``, the files of tests that have done more than compute, and ``computed``, the ids of
tests that are to be left out."""
_OUTSIDE = {
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "socket.__new__", "subprocess.Popen",
}  # fmt: skip
"""Audit events (PEP 578). Python 3.11 has none for threads."""


class SecondPassPlugin:
    """Records in each process that runs tests, or leaves recorded tests out."""

    def __init__(self, config: pytest.Config, cpu_seconds: CpuSecondsPlugin) -> None:
        self._second = os.environ.get("FLEXMARL_SECOND_PASS") == "1"
        self._seconds = cpu_seconds.tests
        self._file: str | None = None
        self._outside: set[str] = set()
        """The files of tests that have done more than compute."""
        self._computed: set[str] = set()
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
        recorded = set(_record(config)["computed"])
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
        self._computed |= {
            test
            for test, seconds in self._seconds.items()
            if seconds >= COSTLY_S and _file_of(test) not in self._outside
        }
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput.update(
                outside=[*self._outside], computed=[*self._computed], left_out=self._left_out
            )
        elif not self._second and (cache := getattr(session.config, "cache", None)) is not None:
            # The session may try some tests of a file once more, which the others of the file have kept in.
            before = _record(session.config)
            outside = self._outside.union(before["outside"])
            computed = {
                test for test in self._computed.union(before["computed"]) if _file_of(test) not in outside
            }
            cache.set(RECORD, {"outside": sorted(outside), "computed": sorted(computed)})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of this session has ended; all of them have left the same tests out."""
        output = getattr(node, "workeroutput", {})
        self._outside |= set(output.get("outside", ()))
        self._computed |= set(output.get("computed", ()))
        self._left_out = max(self._left_out, output.get("left_out", 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.line(
                f"{self._left_out} tests were left out that the first pass saw compute for {COSTLY_S:g} s or more"
            )


def _record(config: pytest.Config) -> dict[str, list[str]]:
    nothing: dict[str, list[str]] = {"outside": [], "computed": []}
    cache = getattr(config, "cache", None)  # with -p no:cacheprovider there is none
    record: dict[str, list[str]] = nothing if cache is None else cache.get(RECORD, nothing)
    return record


def _file_of(test: str) -> str:
    return test.partition("::")[0]
