"""The beginning and the end of one life of a run, in its files."""

import contextlib

from ...actors.messages import RunResult
from ...actors.names import Step
from ...actors.run_events import RunEnded, RunEvent, RunResumed, RunStarted
from ...core.errors import ActorFailed
from ..errors import Interrupted
from ..hosts import env
from ..monitoring.console.display import Display
from ..monitoring.page.frozen_page import write_report
from ..run_folder.event_log import EventLog
from ..run_folder.run_directory import RunDirectory
from . import resuming
from .resuming import StartState
from .run_endings import error_text


def begin_of_run(start: StartState, machine: env.Machine, folder: str) -> RunStarted | RunResumed:
    """The first event of a life that begins with ``start`` on ``machine``, in the run's ``folder``."""
    if start.checkpoint:
        return RunResumed(Step(start.step), **machine, folder=folder, changes=start.changes)
    return RunStarted(Step(start.step), **machine, folder=folder)


def end_of_run(outcome: RunResult | BaseException, wall_s: float) -> RunEnded:
    """The last event of a life that has this result, or has ended with this error, after ``wall_s`` seconds."""
    wall_s = round(wall_s, 3)
    if isinstance(outcome, RunResult):
        step, checkpoint = Step(outcome.last_step), outcome.checkpoint or None
        return RunEnded(outcome.stopped, step, wall_s=wall_s, checkpoint=checkpoint)
    traceback = outcome.remote_traceback if isinstance(outcome, ActorFailed) else None
    stopped = isinstance(outcome, Interrupted)
    return RunEnded(stopped, error=error_text(outcome), traceback=traceback, wall_s=wall_s)


class RunRecord:
    """Writes ``made_with.json``, the first and the last event, and the report. Each life has one end: later ones are
    ignored. ``events``: the run's log."""

    def __init__(self, directory: RunDirectory, start: StartState, display: Display) -> None:
        """Raises OSError, ConfigError if the recipe's folder is missing."""
        self._directory, self._display = directory, display
        resuming.record(directory, start.config)
        self.events = EventLog(directory.events, display)
        self._ended = False
        self.events.write(begin_of_run(start, env.describe_machine(), str(directory.path)))

    def log(self, event: RunEvent) -> None:
        """Writes an event of a sink."""
        self.events.write(event)

    def complete(self, result: RunResult) -> None:
        """Writes the last event of a life with a result and closes the log; ``fail`` does nothing from then on."""
        self.events.write(end_of_run(result, self._display.wall_s))
        self.events.close()
        self._ended = True

    def fail(self, error: BaseException) -> None:
        """Writes ``error`` as the last event and closes the log. May be called again, or after ``complete``: the first
        end stays."""
        if self._ended:
            return
        self._ended = True
        with contextlib.closing(self.events):
            self.events.write(end_of_run(error, self._display.wall_s))

    def report(self) -> None:
        """Writes ``report.html``; warns if it can't be written: the run has its result without it."""
        try:
            write_report(self._directory.path)
        except OSError as error:
            self._display.warn(f"the report can't be written: {error}", at_once=True)

    def report_if_any(self) -> None:
        """The same, if the run has come as far as to measure something."""
        if self._directory.metrics.exists():
            self.report()
