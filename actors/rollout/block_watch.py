"""Finds the line of a recipe that blocks the event loop.

All trajectories share one loop: a workflow that sleeps or computes in it, instead of in ``asyncio.to_thread``, stops
the others. A thread asks the loop once a second for a sign of life. If none comes, it looks at the loop's frames.

A worker whose loop is blocked for too long is lost, and restarted. By the report its next life knows how many of its
lives ended so, one after the other: a recipe that blocks every life would never get further.
"""

import asyncio
import json
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ...core.durable.files import replace_private
from ...core.telemetry import get_logger
from ..errors import RecipeError
from ..recipe.recipe_lines import line_within

log = get_logger(__name__)

_INTERVAL_S = 1.0
_LIMIT_S = 1.0
_MARGIN_S = 0.05


MOST_BLOCKED_LIVES: Final = 3
"""A worker that was lost so often, one life after the other, while the recipe blocked its loop is not restarted."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """``line``: of the recipe, the last one that blocked the loop. ``lasts``: it blocks the loop still. ``lost_lives``:
    of the worker, before the present one, that ended while the recipe blocked their loop; counted from the last one
    that did not."""

    line: str
    lasts: bool
    lost_lives: int = 0


def report_file(logs: Path, worker: str) -> Path:
    """The file with the last line that blocked the rollout worker: a message could not leave a process whose loop is
    blocked. ``logs``: the run's folder for logs, which all hosts share."""
    return logs / f"{worker}.blocked_line"


def read_report(report: Path) -> Blocked | None:
    """None without a report, or with one that no worker has written."""
    try:
        return Blocked(**json.loads(report.read_text(errors="replace")))
    except (OSError, ValueError, TypeError):
        return None


class BlockWatch:
    """Watches the loop that runs when it is made, until ``stop``. ``folder``: the recipe's. ``report``: the file that
    gets the line; that of an earlier life is removed."""

    def __init__(self, folder: Path, report: Path, limit_s: float = _LIMIT_S) -> None:
        """Raises RecipeError if the worker's last lives all ended while the recipe blocked their loop."""
        earlier = read_report(report)
        report.unlink(missing_ok=True)
        self._lost_lives = 0 if earlier is None or not earlier.lasts else earlier.lost_lives + 1
        if earlier is not None and self._lost_lives >= MOST_BLOCKED_LIVES:
            raise RecipeError(
                f"{folder / 'workflow.py'} blocks the event loop of its rollout worker until the worker is lost, "
                f"{self._lost_lives} times one after the other; the last time in {earlier.line}\n"
                "All trajectories of a worker share one loop: run what computes by `await in_process(f, ...)`, and "
                "what waits by `await asyncio.to_thread(f, ...)`"
            )
        self._folder, self._report, self._limit_s = folder, report, limit_s
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="block watch", daemon=True)
        if not getattr(self._loop, "is_virtual", False):  # no real time passes there
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread within a second; nothing waits for it."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            answered = threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            # A process that was stopped by a signal, and continues, answers within the margin.
            if not answered.wait(self._limit_s) and not answered.wait(_MARGIN_S):
                line = self._look()
                while not answered.wait(_INTERVAL_S) and not self._stopped.is_set():
                    pass
                if line is not None and answered.is_set():
                    self._lost_lives = 0
                    self._write(Blocked(line, lasts=False))

    def _look(self) -> str | None:
        line = line_within(self._folder, sys._current_frames().get(self._loop_thread))
        if line is not None:
            log.warning("the workflow blocks its event loop", line=line)
            self._write(Blocked(line, lasts=True, lost_lives=self._lost_lives))
        return line

    def _write(self, blocked: Blocked) -> None:
        try:
            replace_private(self._report, json.dumps(asdict(blocked)).encode())
        except OSError as error:  # the disk is full: the log has the line
            log.warning("the line is not reported", error=str(error))
