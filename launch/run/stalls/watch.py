"""Watches a run's progress, and names what it waits for while it stands still (``standstill.py``)."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ....actors.names import Step
from ....actors.orchestrator.checkpoint import PARTIAL
from ....actors.rollout.block_watch import read_report, report_file
from ....actors.run_events import RunContinued, RunEvent, RunStalled
from ....core.waits import ProcessWaits
from ...config.config_sections import SupervisionConfig
from ...monitoring.console.run_console import RunConsole
from ...run_folder.folder_size import folder_bytes
from ...run_folder.run_directory import RunDirectory
from ..run_feed import Pulse
from ..run_supervision import RunSupervision
from .sentences import sentences, wait_lines
from .standstill import Moving, Standstill, Still

_INTERVAL_S: Final = 1.0
_SAVING_S: Final = 3.0
# A process that is busy answers within this time; the causes have to be known soon.
_ANSWER_TIMEOUT_S: Final = 3.0
_FRESH_S: Final = 1.0


class StallWatch:
    """``standstill``: up to date while ``run`` runs. ``causes``: of the present standstill; empty while the run moves.
    ``observed``: beats after each look."""

    def __init__(
        self,
        console: RunConsole,
        config: SupervisionConfig,
        directory: RunDirectory,
        last_step: Callable[[], int],
    ) -> None:
        """``last_step``: returns the number of the last complete step."""
        self.standstill = Standstill(config.stall_s)
        self.causes: tuple[str, ...] = ()
        self.observed = Pulse()
        self._console = console
        self._silence = f"a fifth of supervision.silence_s={config.silence_s:g}"
        self._directory = directory
        self._last_step = last_step
        self._closing = asyncio.Event()
        self._supervision: RunSupervision | None = None
        self._waits: tuple[float, tuple[str, ...]] = (-_FRESH_S, ())
        """The time of the newest answer to ``waits``, and its lines."""
        self._asking = asyncio.Lock()

    def close(self) -> None:
        """Ends the notices: the run's actors are about to end."""
        self._closing.set()

    async def run(self, supervision: RunSupervision) -> None:
        """Looks at the run's progress once an interval, and reports each standstill and its end as events. Returns
        after ``close``. To be called once."""
        clock = asyncio.get_running_loop().time
        self._supervision = supervision
        while not self._closing.is_set():
            await asyncio.sleep(_INTERVAL_S)
            notice = self.standstill.observe(await self._counts(), clock())
            self.observed.beat()
            match notice:
                case Still(seconds):
                    causes = await self.ask(supervision)
                    if self._closing.is_set():  # they are being killed
                        return
                    self.causes = causes
                    event: RunEvent = RunStalled(Step(self._last_step()), round(seconds, 1), self.causes)
                case Moving(seconds):
                    self.causes = ()
                    event = RunContinued(Step(self._last_step()), round(seconds, 1))
                case None:
                    continue
            await self._console.event(event)

    async def _counts(self) -> dict[str, int]:
        counts = {**self._console.progresses, "console": self._console.progress()}
        # A large policy is one work item, and takes minutes to be saved.
        if self.standstill.idle_s > _SAVING_S:
            folder = self._directory.checkpoints
            counts["checkpoints"] = await self._console.system.run_blocking(
                _partial_bytes, folder, abandon=True
            )
        return counts

    async def ask(self, supervision: RunSupervision) -> tuple[str, ...]:
        """The causes, as the actors name them now."""
        return sentences(*await self._reports(supervision), self._silence)

    async def waits(self) -> tuple[str, ...]:
        """The waits and computations of the actors, also while the run moves; empty before they start. At most a second
        old: any number of readers costs the actors one question a second."""
        clock = asyncio.get_running_loop().time
        async with self._asking:
            asked_s, lines = self._waits
            if self._supervision is not None and clock() - asked_s >= _FRESH_S:
                lines = wait_lines(*await self._reports(self._supervision), self._silence)
                self._waits = clock(), lines
            return lines

    async def _reports(
        self, supervision: RunSupervision
    ) -> tuple[Mapping[str, ProcessWaits], Mapping[str, str]]:
        reports = await supervision.process_waits(_ANSWER_TIMEOUT_S)
        blocked = {name: blocking_line(report_file(self._directory.logs, name)) for name in reports}
        return reports, blocked


def blocking_line(report: Path) -> str:
    """The line that blocks a rollout worker's loop at present; empty if none does."""
    blocked = read_report(report)
    return blocked.line if blocked is not None and blocked.lasts else ""


def _partial_bytes(checkpoints: Path) -> int:
    """The bytes of the checkpoints that are being saved."""
    return sum(folder_bytes(folder) for folder in checkpoints.glob(f"*{PARTIAL}"))
