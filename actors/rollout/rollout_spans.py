"""A rollout worker's spans: trajectories, turns, their waits for instances, and the time between turns."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ...core.spans import SpanRecorder
from ..names import AgentName, PolicyName
from ..sample_id import turn_of
from ..spans import record
from .resumable_turn import ResumableTurn
from .trajectory import Trajectory

_LEAST_S: Final = 1e-3
"""Shorter waits and times between turns are left out: there would be as many as turns, and nothing to see."""


class RolloutSpans:
    """``worker``: the name of the rollout worker. It has three lanes: those of trajectories would hide all others."""

    def __init__(self, spans: SpanRecorder, worker: str) -> None:
        self._spans = spans
        self._trajectories = f"{worker} trajectories"
        self._turns = f"{worker} turns"
        self._environment = f"{worker} environment"

    @contextmanager
    def trajectory(self, trajectory: Trajectory) -> Iterator[None]:
        """A trajectory runs."""
        begin = self._spans.now()
        try:
            yield
        finally:
            self._record(self._trajectories, "trajectory", begin, trajectory)

    def between_turns(self, trajectory: Trajectory) -> None:
        """A turn of a trajectory begins, or its workflow has returned: until now it was the workflow's time, if no turn
        was under way."""
        if trajectory.turns_open:
            return
        seconds = asyncio.get_running_loop().time() - trajectory.active_at
        if seconds >= _LEAST_S:
            self._record(self._environment, "environment", self._spans.now() - seconds, trajectory)

    @contextmanager
    def turn(
        self, agent: AgentName, policy: PolicyName, trajectory: Trajectory
    ) -> Iterator[list[ResumableTurn]]:
        """A turn runs; the block puts it into the list once there is one."""
        self.between_turns(trajectory)
        begin = self._spans.now()
        turns: list[ResumableTurn] = []
        try:
            yield turns
        finally:
            for turn in turns:
                note = "" if turn.ended else "it was not ended"
                self._record(self._turns, "turn", begin, trajectory, turn, agent, policy, note)

    @contextmanager
    def wait(
        self, agent: AgentName, policy: PolicyName, trajectory: Trajectory, turn: ResumableTurn
    ) -> Iterator[None]:
        """A turn waits for an instance that serves its version."""
        begin = self._spans.now()
        try:
            yield
        finally:
            if self._spans.now() - begin >= _LEAST_S:
                self._record(self._turns, "wait", begin, trajectory, turn, agent, policy)

    def _record(
        self,
        lane: str,
        kind: str,
        begin: float,
        trajectory: Trajectory,
        turn: ResumableTurn | None = None,
        agent: str = "",
        policy: str = "",
        note: str = "",
    ) -> None:
        number = version = tokens = -1
        if turn is not None:
            number, version, tokens = turn_of(turn.request.sample_id), turn.policy_version, len(turn.tokens)
        step = -1 if trajectory.step is None else trajectory.step
        attributes = (trajectory.number, number, version, step, -1, tokens)
        end = self._spans.now()
        record(self._spans, lane, kind, begin, end, trajectory.query.id, agent, policy, note, *attributes)
