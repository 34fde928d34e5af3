"""Finds the line of a recipe that blocks the event loop.

All trajectories share one loop: a workflow that sleeps or computes in it, instead of in ``asyncio.to_thread``, stops
the others. A thread asks the loop once a second for a sign of life. If none comes, it looks at the loop's frames.
"""

import asyncio
import linecache
import sys
import threading
from pathlib import Path
from types import FrameType

from ...core.errors import NotInVirtualTime
from ...core.telemetry import get_logger

log = get_logger(__name__)

_INTERVAL_S = 1.0
_LIMIT_S = 1.0
_MARGIN_S = 0.05


def report_file(logs: Path, worker: str) -> Path:
    """The file with the last line that blocked the rollout worker: a message could not leave a process whose loop is
    blocked. ``logs``: the run's folder for logs, which all hosts share."""
    return logs / f"{worker}.blocked_line"


class BlockWatch:
    """Watches the loop that runs when it is made, until ``stop``. ``folder``: the recipe's. ``report``: the file that
    gets the line; that of an earlier life is removed."""

    def __init__(self, folder: Path, report: Path, limit_s: float = _LIMIT_S) -> None:
        report.unlink(missing_ok=True)
        self._folder, self._report, self._limit_s = folder, report, limit_s
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="block watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread within a second; nothing waits for it."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            answered = threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except (RuntimeError, NotInVirtualTime):  # the loop is closed, or has no real time
                return
            # A process that was stopped by a signal, and continues, answers within the margin.
            if not answered.wait(self._limit_s) and not answered.wait(_MARGIN_S):
                self._look()
                while not answered.wait(_INTERVAL_S) and not self._stopped.is_set():
                    pass

    def _look(self) -> None:
        line = line_within(self._folder, sys._current_frames().get(self._loop_thread))
        if line is None:
            return
        log.warning("the workflow blocks its event loop", line=line)
        aside = self._report.with_suffix(".tmp")
        try:
            aside.write_text(line)
            aside.replace(self._report)
        except OSError as error:  # the disk is full: the log has the line
            log.warning("the line is not reported", error=str(error))


def line_within(folder: Path, frame: FrameType | None) -> str | None:
    """The innermost line of a file in ``folder``: ``workflow.py:12, in workflow: time.sleep(5)``; None without one."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(folder):
            source = linecache.getline(str(file), frame.f_lineno).strip()
            return f"{file.relative_to(folder)}:{frame.f_lineno}, in {frame.f_code.co_name}: {source}"
        frame = frame.f_back
    return None
