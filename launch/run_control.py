"""The launcher's actor that other programs of the same user ask about the run, and ask to stop it."""

from collections.abc import Callable
from dataclasses import dataclass

from ..core.actor import Actor, endpoint
from .console.run_console import RunConsole
from .run_config import RunConfig
from .run_feed import Broadcast

NAME = "control"


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    pid: int
    rss_mib: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """``step``: the last complete one, of ``steps``. ``since_s``: seconds since this life of the run began.
    ``instances``: by policy. ``processes``: those that answered last, by actor; at most about a second old."""

    step: int
    steps: int
    phase: str
    since_s: float
    instances: dict[str, int]
    processes: dict[str, ProcessStatus]


class RunControl(Actor):
    """``request_stop``: see ``Run.request_stop``. ``first``: steps that finished before a resume."""

    def __init__(
        self,
        config: RunConfig,
        first: int,
        broadcast: Broadcast,
        console: RunConsole,
        request_stop: Callable[..., bool],
    ) -> None:
        self._config, self._first = config, first
        self._broadcast, self._console = broadcast, console
        self._request_stop = request_stop

    @endpoint
    async def status(self) -> RunStatus:
        return RunStatus(
            step=max(self._first, self._broadcast.last_step),
            steps=self._config.training.steps,
            phase=self._broadcast.last_phase,
            since_s=round(self._broadcast.wall_s, 1),
            instances={
                ", ".join(policies): count for policies, count in self._config.served_together().items()
            },
            processes={
                name: ProcessStatus(process.pid, round(process.rss_mib, 1))
                for name, process in self._console.processes.items()
            },
        )

    @endpoint
    async def stop(self, by: str, now: bool) -> bool:
        """Asks the run to end; True: after the steps under way, with a checkpoint."""
        return self._request_stop(by, now=now)
