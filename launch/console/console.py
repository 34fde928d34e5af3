"""The launcher's own actor: receives what the run tells, shows it and writes it down."""

import asyncio
import contextlib
from typing import Any

from ...actors.messages import RunEnded
from ...core.actor import Actor, endpoint
from ...core.telemetry import ProcessStatistics
from ..run_directory import JsonLines, RunDirectory
from .progress import Progress

_SHOWN_FAILURES = 3


class Console(Actor):
    """Fulfils ``ConsoleApi``. ``ended_with`` is set to the run's result."""

    def __init__(self, run: RunDirectory, progress: Progress) -> None:
        self.ended_with: asyncio.Future[RunEnded] = asyncio.get_running_loop().create_future()
        self.processes: dict[str, ProcessStatistics] = {}
        self.last_step = 0
        self._progress = progress
        self._metrics = JsonLines(run.metrics)
        self._events = JsonLines(run.events)
        self._failures = 0
        self._warned_of_silence = False

    def refresh(self, processes: dict[str, ProcessStatistics]) -> None:
        """Takes the processes' figures; to be called now and then, for the display moves with it."""
        self.processes = processes
        self._progress.tick()

    async def on_stop(self) -> None:
        self.ended_with.cancel()
        with contextlib.closing(self._events), contextlib.closing(self._metrics):
            pass  # both are closed, also where one can't be written any more

    @endpoint
    async def step(self, metrics: dict[str, Any]) -> None:
        for name, figures in self.processes.items():
            metrics[f"loop_lag_ms/{name}"] = round(figures.loop_lag_ms, 3)
            metrics[f"rss_mib/{name}"] = round(figures.rss_mib, 1)
            metrics[f"cpu_s/{name}"] = round(figures.cpu_s, 2)
        self._metrics.write(metrics)
        self.last_step = metrics["step"]
        self._progress.step(metrics)
        if metrics["tokens"] == 0 and not self._warned_of_silence:
            self._warned_of_silence = True
            self._progress.warn(
                f"no agent generated anything in step {self.last_step}: nothing can be learned from it"
            )

    @endpoint
    async def phase(self, text: str, done: int | None, total: int | None) -> None:
        self._progress.phase(text, done, total)

    @endpoint
    async def event(self, event: str, fields: dict[str, Any]) -> None:
        self._show(event, fields)  # first: what can't be written down is to be seen at least
        self._events.event(event, **fields)

    @endpoint
    async def ended(self, result: RunEnded) -> None:
        self.ended_with.set_result(result)

    def _show(self, event: str, fields: dict[str, Any]) -> None:
        match event:
            case "trajectory_failed":
                self._failures += 1
                if self._failures <= _SHOWN_FAILURES:
                    self._progress.warn(f"trajectory {fields['trajectory']} was dropped: {fields['error']}")
            case "actor_silent":
                hint = "; does the workflow block its event loop?" if fields["actor"] == "rollout" else ""
                self._progress.warn(f"{fields['actor']} has not answered for {fields['seconds']:g} s{hint}")
            case "store_full":
                self._progress.warn(f"the store waits for room: {fields['problem']}")
            case "columns_awaited":
                self._progress.warn(
                    f"{fields['samples']} samples of {fields['agent']} wait for {fields['columns']}, which somebody "
                    "outside of the run writes"
                )
            case "store_has_room":
                self._progress.note("the store has room again")
            case "evaluated" if fields["step"] == 0:  # later ones come with their step's metrics
                metrics = {name: value for name, value in fields.items() if name not in ("step", "eval_s")}
                figures = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
                self._progress.note(f"before training: {figures}")
            case "checkpoint_saved":
                self._progress.note(f"checkpoint saved: {fields['folder']}")
            case "warmed_up":
                self._progress.note(
                    f"{fields['agent']} warmed up on {fields['batches']} supervised batches, loss {fields['loss']:.3f}"
                )
