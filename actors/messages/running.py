"""Messages that start and stop a run, and those that show it."""

from dataclasses import dataclass
from typing import Final, Protocol

from ...core.actor import endpoint
from ..errors import QueriesRefused
from ..names import PolicyName, Step, Version
from ..run_events import RunEvent
from ..step_metrics import StepMetrics
from .rollouts import GroupClosed, GroupWaiting, LoggedGroup, Query, QueryAnswer

WORK_TIMEOUT_S: Final = 24 * 3600.0
"""Deadline of long operations, queueing included: catches one that hangs, never one that is slow."""


class OrchestratorApi(Protocol):
    async def start(self) -> None:
        """Begins the run; the console gets its progress and its end."""

    async def stop(self) -> None:
        """Ends the run after the steps under way, with a checkpoint."""

    @endpoint(raises=[QueriesRefused])
    async def submit(
        self, queries: list[Query], judged: bool = True, *, sessions: bool = False
    ) -> list[QueryAnswer]:
        """Rolls out and trains queries from outside: at once under ``async``, else in the next step that begins, or,
        beyond its size, in later ones; they take the place of drawn ones. Returns the answers, in their order, once all
        are rolled out; if not ``judged``, without waiting for rewards from outside. ``sessions``: each is one
        trajectory, which a program outside the run plays."""

    @endpoint(raises=[QueriesRefused])
    async def submit_logged(self, groups: list[LoggedGroup]) -> list[QueryAnswer]:
        """Trains trajectories that have ended before, in the next steps that begin, in place of queries that these
        would draw. Returns the answers, in their order, once all are in the store or are dropped."""

    async def group_waits(self, writer: str, group: GroupWaiting) -> None:
        """A group lacks nothing but rewards. Under ``async`` its step does not wait for it; ``admit`` then."""

    async def admit(self, writer: str, step: Step, query: str, oldest: dict[PolicyName, Version]) -> str:
        """A group that its step may not wait for has all of its rewards. Empty: a step waits for its samples now. Else
        the reason for which no step can train them: they are not put. ``oldest``: as in ``GroupWaiting``."""

    async def group_closed(self, writer: str, group: GroupClosed) -> None:
        """A group of the rollout worker whose life ``writer`` names has closed; ignored if it is no longer its."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """``stopped``: by request, before the last step. ``evaluations``: step -> metrics."""

    last_step: int
    stopped: bool
    evaluations: dict[int, dict[str, float]]
    checkpoint: str


class ConsoleApi(Protocol):
    """Shows the run to the person who started it, and logs it."""

    async def step(self, metrics: StepMetrics) -> None:
        """A step is complete, its evaluation included."""

    async def phase(self, text: str, done: int | None, total: int | None) -> None:
        """The run's present work, and how much of it is done."""

    async def event(self, event: RunEvent) -> None:
        """An event of the run has happened: for ``events.jsonl``, and for the person."""

    async def ended(self, result: RunResult) -> None:
        """The last message of a run that did not fail."""


class SupervisorApi(Protocol):
    """The supervisor that restarts actors (``core.supervision.supervisor``)."""

    async def lost(self, name: str, incarnation: int, reason: str) -> None:
        """This incarnation of the actor ``name`` was lost: if it still runs it is killed."""

    async def locate(self, name: str) -> str:
        """The address of the actor ``name``: another one after its host was lost, empty while none is known."""

    async def locate_node(self, name: str) -> str:
        """The address of the process that starts those of the actor ``name`` on another host; empty on this host."""
