"""A rollout worker's spans: trajectories, turns, their waits for instances, and the time between turns.

Each takes its begin from ``now``: there are hundreds in a second, and a context manager would cost as much as the span.
"""

import asyncio
from typing import Final

from ...core.spans import SpanRecorder
from ..names import AgentName, PolicyName
from .resumable_turn import ResumableTurn
from .trajectory import Trajectory

_LEAST_S: Final = 1e-3
"""Shorter waits and times between turns are left out: there would be as many as turns, and nothing to see."""


class RolloutSpans:
    """``worker``: the name of the rollout worker. It has three lanes: those of trajectories would hide all others."""

    def __init__(self, spans: SpanRecorder, worker: str) -> None:
        self.now = spans.now
        """Seconds of the clock of spans."""
        self._add = spans.add
        self._trajectory = f"{worker} trajectories", "trajectory", "", "", ""
        self._environment = f"{worker} environment", "environment", "", "", ""
        self._turns = f"{worker} turns"

    def trajectory(self, trajectory: Trajectory, begin: float) -> None:
        """A trajectory has ended."""
        query, step = trajectory.query.id, trajectory.step
        self._add(
            begin, self.now(), self._trajectory, query,
            trajectory.number, -1, -1, -1 if step is None else step, key=query,
        )  # fmt: skip

    def between_turns(self, trajectory: Trajectory) -> None:
        """A turn of a trajectory begins, or its workflow has returned: until now it was the workflow's time, if no turn
        was under way."""
        if trajectory.turns_open:
            return
        seconds = asyncio.get_running_loop().time() - trajectory.active_at
        if seconds >= _LEAST_S:
            end, query, step = self.now(), trajectory.query.id, trajectory.step
            self._add(
                end - seconds, end, self._environment, query,
                trajectory.number, -1, -1, -1 if step is None else step, key=query,
            )  # fmt: skip

    def turn(
        self, agent: AgentName, policy: PolicyName, trajectory: Trajectory, turn: ResumableTurn, begin: float
    ) -> None:
        """A turn has ended, or is given up."""
        note = "" if turn.ended else "it was not ended"
        self._of_turn((self._turns, "turn", agent, policy, note), trajectory, turn, begin, self.now())

    def wait(
        self, agent: AgentName, policy: PolicyName, trajectory: Trajectory, turn: ResumableTurn, begin: float
    ) -> None:
        """A turn has waited for an instance that serves its version."""
        end = self.now()
        if end - begin >= _LEAST_S:
            self._of_turn((self._turns, "wait", agent, policy, ""), trajectory, turn, begin, end)

    def _of_turn(
        self,
        label: tuple[str, str, str, str, str],
        trajectory: Trajectory,
        turn: ResumableTurn,
        begin: float,
        end: float,
    ) -> None:
        query, step = trajectory.query.id, -1 if trajectory.step is None else trajectory.step
        self._add(
            begin, end, label, query,
            trajectory.number, turn.number, turn.policy_version, step, -1, len(turn.tokens), key=query,
        )  # fmt: skip
