"""Signals during a run of the command line."""

import asyncio
import signal
from typing import Final, Self

from ...actors.messages import RunResult
from ..monitoring.console.display import Display
from ..run.run import Run

# Slurm sends SIGTERM to all processes of a job, and the batch script passes its own on: both are one request.
SAME_REQUEST_S: Final = 2.0


async def train_until_signal(run: Run, display: Display) -> RunResult:
    """Trains until the last step, a stop signal, or a failure.

    The first ctrl-C (SIGINT), SIGTERM or SIGHUP ends the run after the steps under way, with a checkpoint; a second
    one, or one before the training begins, ends it at once (Interrupted). Raises the errors of ``Run``.
    """
    with StopSignals(run, display):  # outermost: a signal during the cleanup must not interrupt it
        async with run:
            return await run.wait()


def stop_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM, and SIGHUP unless it was ignored when the process began (``nohup``)."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP during a run: the first asks it to stop, the second ends it.

    A closed terminal may send SIGHUP twice, from the shell and from the kernel: after another signal it changes
    nothing.
    """

    def __init__(self, run: Run, display: Display) -> None:
        self._run, self._display = run, display
        self._is_stopping = False
        self._terminated_s = -SAME_REQUEST_S
        self._handled = stop_signals()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in self._handled:
            loop.add_signal_handler(number, self._handle_signal, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._handled:
            loop.remove_signal_handler(number)

    def _handle_signal(self, number: signal.Signals) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGTERM:
            now = asyncio.get_running_loop().time()
            if now - self._terminated_s < SAME_REQUEST_S:
                return
            self._terminated_s = now
        if self._is_stopping:
            if number != signal.SIGHUP:
                self._run.request_stop(name, now=True)
        elif self._run.request_stop(name):
            self._is_stopping = True
            self._display.warn(
                f"{name}: stopping after the steps under way; once more stops at once", at_once=True
            )
