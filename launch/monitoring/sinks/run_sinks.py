"""The sinks of one life of a run."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import TracebackType
from typing import Final, Self

from ....actors.run_events import Evaluated, RunEvent
from ....actors.step_metrics import StepMetrics
from ...run_folder.json_lines import VERSIONS, metrics_to_json
from ..formatting import number
from .sink import Figures, Sink, SinkRun
from .sink_thread import SinkThread

_CLOSE_S: Final = 30.0
_CLOSE_AT_ONCE_S: Final = 5.0


class RunSinks:
    """Feeds steps and evaluations to sinks, as a context of the loop. At its end it waits up to 30 s for sinks that
    still write, and up to 5 s if the run has failed or was stopped at once."""

    def __init__(
        self,
        sinks: Sequence[tuple[str, Sink]],
        run: SinkRun,
        report: Callable[[RunEvent], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``sinks``: by name. ``report``: is called with their events. ``clock``: Unix seconds."""
        self._sinks, self._run, self._report, self._clock = sinks, run, report, clock
        self._threads: list[SinkThread] = []

    async def __aenter__(self) -> Self:
        self._threads = [SinkThread(name, sink, self._run, self._report) for name, sink in self._sinks]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout_s = _CLOSE_S if error is None else _CLOSE_AT_ONCE_S
        async with asyncio.TaskGroup() as closing:
            for thread in self._threads:
                closing.create_task(thread.close(timeout_s, failed=error is not None))

    def step(self, metrics: StepMetrics) -> None:
        """Passes the figures of a complete step to all sinks. Returns at once: their threads write."""
        self._put(partial(figures_of_step, metrics, self._clock()))

    def event(self, event: RunEvent) -> None:
        """Passes an evaluation to all sinks, as ``step`` does; other events have no figures."""
        if isinstance(event, Evaluated):
            self._put(partial(figures_of_evaluation, event, self._clock()))

    def _put(self, compute: Callable[[], Figures]) -> None:
        once = cache(compute)  # by the first of the threads
        for thread in self._threads:
            thread.put(once)


def figures_of_step(metrics: StepMetrics, time_s: float) -> Figures:
    """Without the evaluation after the step, which is reported as an event of its own."""
    line = metrics_to_json(metrics)
    figures = {
        f"{key}/{policy}": float(version) for key in VERSIONS for policy, version in line.pop(key).items()
    }
    for key, value in line.items():
        if not key.startswith("eval/") and key != "eval_s" and (finite := number(value)) is not None:
            figures[key] = finite
    return Figures("step", metrics.step, time_s, figures)


def figures_of_evaluation(event: Evaluated, time_s: float) -> Figures:
    """The metrics of an evaluation as ``eval/<name>``, and its seconds as ``eval_s``; those that are not finite are
    left out."""
    figures = {
        f"eval/{name}": finite
        for name, value in event.metrics.items()
        if (finite := number(value)) is not None
    }
    return Figures("evaluation", event.step, time_s, figures | {"eval_s": event.eval_s})
