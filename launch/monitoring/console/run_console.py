"""The launcher's own actor: shows and logs the reports of the run's actors."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ....actors.figures import Numbers, StepFigures, drop_hidden_zeros
from ....actors.messages import ConsoleApi, RunResult
from ....actors.run_events import (
    CheckpointSaved,
    CheckpointSaving,
    Evaluated,
    InstanceMoved,
    NodeJoined,
    OpponentDrawn,
    PolicyResumed,
    PolicySuspended,
    RunEvent,
    SftDone,
    WeightsPathChosen,
)
from ....actors.step_metrics import StepMetrics
from ....core.actor import Actor, endpoint
from ....core.supervision.process_statistics import ProcessStatistics
from ...hosts.nvidia import DeviceUse
from ...run_folder.event_log import EventLog
from ...run_folder.json_lines import metrics_to_json
from ...run_folder.line_writer import LineWriter
from ...run_folder.run_directory import RunDirectory
from ..slowness.evidence import WINDOW
from .display import Display
from .learning_watch import LearningWatch

_ENDS = (
    SftDone,
    Evaluated,
    CheckpointSaving,
    CheckpointSaved,
    OpponentDrawn,
    InstanceMoved,
    WeightsPathChosen,
    PolicySuspended,
    PolicyResumed,
    NodeJoined,
)
"""Events that are the end of some work."""


class RunConsole(Actor, ConsoleApi):
    """Shows a run on ``display`` and writes its ``metrics.jsonl`` and ``events.jsonl``.

    ``ended_with`` is set to the run's result.
    """

    def __init__(
        self,
        run: RunDirectory,
        display: Display,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``events``: on the same display, and closed by its owner; None: makes one.
        ``clock``: Unix seconds, of the events in the file."""
        self._clock = clock
        self.ended_with: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self.processes: dict[str, ProcessStatistics] = {}
        self.progresses: dict[str, int] = {}
        """Work items that have ended, by process."""
        self._devices: dict[str, list[DeviceUse]] = {}
        """The readings of each device since the last step."""
        self._display = display
        self._metrics = LineWriter(run.metrics, partial(display.warn, at_once=True))
        self._events = events or EventLog(run.events, display)
        self._closes_events = events is None
        self._warned_of_silence = False
        self._learning = LearningWatch()
        self.recent_steps: deque[StepMetrics] = deque(maxlen=WINDOW)
        """The newest steps of this life, for the findings about them."""
        self._ended_items = 0
        self._done: int | None = None
        """The number that the present phase has last reported."""

    def progress(self) -> int:
        """Steps, and events and parts of phases that are the end of some work."""
        return self._ended_items

    def refresh(self, processes: dict[str, ProcessStatistics]) -> None:
        """Takes the statistics of the processes; to be called regularly, because it also updates the display."""
        self.processes = processes
        self._display.tick()
        self._metrics.retry()
        self._events.retry()

    def process_heard(self, name: str, figures: ProcessStatistics) -> None:
        """Takes the progress of one process, as soon as it answers: others may be silent for long."""
        self.progresses[f"{name}, process {figures.pid}"] = figures.progress

    def devices_read(self, devices: Mapping[str, DeviceUse]) -> None:
        """Takes the load of the machine's devices, by UUID."""
        for uuid, use in devices.items():
            self._devices.setdefault(uuid, []).append(use)

    async def on_stop(self) -> None:
        self.ended_with.cancel()
        self._metrics.close()
        if self._closes_events:
            self._events.close()

    @endpoint
    async def step(self, metrics: StepMetrics) -> None:
        metrics = replace(
            metrics,
            by_process={name: _process_numbers(process) for name, process in self.processes.items()},
            by_device={uuid: _device_numbers(readings) for uuid, readings in self._devices.items()},
            by_actor={
                actor: {figure: _round(value) for figure, value in figures.items()}
                for process in self.processes.values()
                for actor, figures in process.actors.items()
            },
        )
        for readings in self._devices.values():
            del readings[:-1]  # a step may be shorter than the time between two readings
        self.recent_steps.append(metrics)
        self._ended_items += 1
        self._metrics.write(metrics_to_json(metrics))
        self._display.step(metrics)
        if metrics.tokens == 0 and not self._warned_of_silence:
            self._warned_of_silence = True
            self._display.warn(
                f"no agent generated anything in step {metrics.step}: nothing can be learned from it"
            )
        for text in self._learning.warnings(metrics):
            self._display.warn(text)

    @endpoint
    async def phase(self, text: str, done: int | None, total: int | None) -> None:
        if done is not None and done != self._done:
            self._done = done
            self._ended_items += 1
        self._display.phase(text, done, total)

    @endpoint
    async def event(self, event: RunEvent) -> None:
        """An event of an actor. Its time in the file is that of its arrival here, by this host's clock."""
        self._ended_items += isinstance(event, _ENDS)
        self._events.write(event, self._clock())

    @endpoint
    async def ended(self, result: RunResult) -> None:
        self.ended_with.set_result(result)


def _process_numbers(process: ProcessStatistics) -> Numbers:
    mailboxes, peers = process.mailboxes, process.peers
    numbers: Numbers = {
        "loop_lag_ms": round(process.loop_lag_ms, 3),
        "rss_mib": round(process.rss_mib, 1),
        "cpu_s": round(process.cpu_s, 2),
        "mailbox_waiting": mailboxes.waiting,
        "mailbox_running": mailboxes.running,
        "mailbox_served": mailboxes.served,
        "mailbox_failed": mailboxes.failed,
        "mailbox_cancelled": mailboxes.cancelled,
        "open_calls": peers.open_calls,
        "credit_waits": peers.credit_waits,
        "sent_requests": peers.sent_requests,
        "expired_calls": peers.expired_calls,
        "lost_requests": peers.lost_requests,
        "refused_messages": peers.refused_messages,
    }
    return drop_hidden_zeros("process", numbers)


def _device_numbers(readings: Sequence[DeviceUse]) -> Numbers:
    figures = StepFigures("device")
    for use in readings:
        figures.add("device_used_mib", use.used_bytes / 2**20)
        if use.utilisation_percent is not None:
            figures.add("device_busy_percent", use.utilisation_percent)
    return {name: round(value, 1) for name, value in figures.numbers().items()}


def _round(value: float) -> float:
    """Whole numbers as they are, others with six significant digits."""
    return int(value) if value.is_integer() else float(f"{value:.6g}")
