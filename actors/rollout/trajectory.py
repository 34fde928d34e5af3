"""One run of the workflow on one query: what names it, how its time is counted, which turns it took."""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ..declared_columns import Columns
from ..errors import InvalidColumn, RecipeError
from ..messages import Query, Sample
from ..workflow import Rewards
from .resumable_turn import ResumableTurn
from .turn_columns import TurnColumns


class Deadline:
    """``limit_s`` seconds from now, less the time it was paused. ``overran`` is done when they have passed."""

    def __init__(self, limit_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._left_s = limit_s
        self._pauses = 0
        self._timer: asyncio.TimerHandle | None = None
        self.overran: asyncio.Future[None] = self._loop.create_future()
        self._run()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """May be entered several times at once."""
        self._pauses += 1
        if self._timer is not None:
            self._left_s = self._timer.when() - self._loop.time()
            self._cancel()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._run()

    def stop(self) -> None:
        """It is of no interest any more."""
        self._cancel()
        self.overran.cancel()

    def _run(self) -> None:
        if not self.overran.done():
            self._timer = self._loop.call_later(max(0.0, self._left_s), self._pass)

    def _pass(self) -> None:
        self._timer = None
        if not self.overran.done():
            self.overran.set_result(None)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Trajectory:
    """``scope`` (the step, or ``eval``) makes names unique over the run, also where a query comes again.

    ``group`` is ``{scope}:{query}``, a turn's sample id ``{group}_{turn}_{trajectory}``. ``versions`` generate its
    turns, by agent; with ``allow_newer`` these or later ones, so that a trajectory and even a turn may begin with one
    version and go on with the next: every token carries its own.
    """

    def __init__(
        self,
        query: Query,
        scope: str,
        number: int,
        versions: Mapping[str, int],
        *,
        greedy: bool,
        allow_newer: bool = False,
    ) -> None:
        self.query = query
        self.group = f"{scope}:{query.id}"
        self.number = number
        self.versions = versions
        self.greedy = greedy
        self.rewards = Rewards()
        self.first_turn_at = math.inf
        self.allow_newer = allow_newer
        self.deadline: Deadline | None = None
        self._turns: list[tuple[str, ResumableTurn]] = []
        self._columns: dict[str, TurnColumns] = {}
        self._overran: list[tuple[str, BaseException]] = []
        self._asked = 0
        self._closed = False

    @property
    def name(self) -> str:
        return f"{self.group}_{self.number}"

    def next_sample_id(self) -> str:
        """Of a turn that is being asked for. Raises RecipeError once the workflow has returned."""
        if self._closed:
            raise RecipeError(f"trajectory {self.name}: the workflow asked for a turn after it had returned")
        self._asked += 1
        return f"{self.group}_{self._asked - 1}_{self.number}"

    def took(self, agent: str, turn: ResumableTurn) -> None:
        """A turn has ended. One that ends after its workflow returned is no part of the trajectory."""
        if not self._closed:
            self._turns.append((agent, turn))

    def columns_of(self, agent: str, sample_id: str, declared: Columns) -> TurnColumns:
        """What the workflow may write of a turn."""
        columns = TurnColumns(agent, sample_id, declared, lambda: self._closed)
        self._columns[sample_id] = columns
        return columns

    def check_columns(self) -> None:
        """Raises InvalidColumn where the workflow has left out a required one."""
        for agent, turn in self._turns:
            sample_id = turn.request.sample_id
            if missing := self._columns[sample_id].missing():
                raise InvalidColumn(
                    f"agent {agent}: the workflow has not written {', '.join(missing)} of turn {sample_id}, which "
                    f"agents.{agent}.columns.{missing[0]}.required demands: Turn.write before it returns"
                )

    def close(self) -> None:
        """The workflow has returned: the trajectory's turns are those that have ended."""
        self._closed = True

    def agents_used(self) -> set[str]:
        return {agent for agent, _ in self._turns}

    def longest_turns(self) -> dict[str, int]:
        """Generated tokens of each agent's longest turn, for agents that had one."""
        longest: dict[str, int] = {}
        for agent, turn in self._turns:
            longest[agent] = max(longest.get(agent, 0), len(turn.tokens))
        return longest

    @contextmanager
    def waiting_for_a_version(self) -> Iterator[None]:
        """The time inside does not count against the deadline: it is the trainer's, not the trajectory's."""
        if self.deadline is None:
            yield
            return
        with self.deadline.paused():
            yield

    def turn_overran(self, agent: str, error: BaseException) -> None:
        """A turn took longer than it may; the workflow gets ``error``."""
        self._overran.append((agent, error))

    def agent_that_overran(self, error: BaseException) -> str | None:
        """Whose turn's deadline it was that ended the workflow with ``error``; None where it was no deadline."""
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
        return next((agent for agent, raised in self._overran if raised in inner), None)

    def turn_begins(self) -> None:
        self.first_turn_at = min(self.first_turn_at, time.monotonic())

    def samples(
        self, step: int, query_position: int, group_rewards: Mapping[str, tuple[float, ...]]
    ) -> list[Sample]:
        """Its turns as rows; ``group_rewards`` are those of all surviving trajectories, by agent."""
        return [
            Sample(
                sample_id=turn.request.sample_id,
                agent=agent,
                step=step,
                policy_version=turn.policy_version,
                group=self.group,
                reward=self.rewards.by_agent[agent],
                group_rewards=group_rewards[agent],
                prompt_tokens=turn.prompt_tokens,
                tokens=turn.tokens,
                logprobs=turn.logprobs,
                query_position=query_position,
                version_changes=turn.version_changes,
                columns=self._columns[turn.request.sample_id].values,
            )
            for agent, turn in self._turns
        ]


def where_it_hangs(task: "asyncio.Task[Any]") -> TimeoutError:
    """An error whose traceback shows what a suspended task is waiting in."""
    frames = []
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        frames.append(frame)
        waiting = waiting.cr_await
    traceback: TracebackType | None = None
    for frame in reversed(frames):
        traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
    return TimeoutError("hangs here").with_traceback(traceback)
