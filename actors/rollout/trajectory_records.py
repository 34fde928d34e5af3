"""The record of a worker's trajectories, for people: made when a group or an evaluation's trajectory has ended."""

from collections.abc import Mapping, Sequence
from typing import Final

from ..gateway.program import ProgramEnd
from ..messages import Sample
from ..names import Step
from ..record_queue import ANSWER_TIMEOUT_S, RecordKind, RecordQueue, RunBlocking
from ..recorded_trajectory import (
    PromptPart,
    Record,
    RecordedProgram,
    RecordedTrajectory,
    RecordedTurn,
    compress_record,
    pack_record,
)
from ..sample_id import turn_of
from ..workflow import Prompt, Turn
from .groups.group_run import GroupRun, TrajectoryEnd
from .rollout_setup import RolloutSetup
from .trajectory import Trajectory

_KEPT_OUTPUT: Final = 2000
"""Characters of a program's output. Rows are read whole by each reader: they stay small."""


class TrajectoryRecords:
    """Does nothing if the run records no trajectories."""

    def __init__(self, setup: RolloutSetup, run_blocking: RunBlocking) -> None:
        """``run_blocking``: as of an actor's system."""
        self._queue: RecordQueue[Record] | None = None
        if setup.archive is not None:
            keep = setup.archive.within(ANSWER_TIMEOUT_S).keep
            self._queue = RecordQueue(RecordKind("trajectories", compress_record, keep), run_blocking)
        self._agents = setup.agents

    @property
    def dropped(self) -> int:
        """Trajectories of this worker that are not in the run's file, though they should be."""
        return 0 if self._queue is None else self._queue.dropped

    async def run(self) -> None:
        """Sends what is recorded until it is cancelled."""
        if self._queue is not None:
            await self._queue.run()

    async def drain(self, limit_s: float) -> None:
        """Sends what is left, within ``limit_s``. To be called when ``run`` has ended."""
        if self._queue is not None:
            await self._queue.drain(limit_s)

    def note_prompt(self, trajectory: Trajectory, sample_id: str, prompt: Prompt) -> None:
        """A turn begins."""
        if self._queue is not None:
            trajectory.note_prompt(sample_id, asked_prompt(prompt))

    def closed(self, run: GroupRun) -> None:
        """Records the trajectories of a group that have ended by now: those that count, those that failed, and those
        that are left over."""
        if self._queue is not None and run.ended:
            samples = {sample.sample_id: sample for sample in run.credited_turns}
            self._add(
                self._queue,
                [self._record(run.step, False, end, samples) for _, end in sorted(run.ended.items())],
            )

    def evaluated(self, step: Step, end: TrajectoryEnd) -> None:
        """Records a trajectory of the evaluation after ``step``."""
        if self._queue is not None:
            self._add(self._queue, [self._record(step, True, end, {})])

    def _add(self, queue: RecordQueue[Record], trajectories: Sequence[RecordedTrajectory]) -> None:
        record = pack_record(trajectories)
        queue.add(record, record.size, len(trajectories))

    def _record(
        self, step: Step, evaluation: bool, end: TrajectoryEnd, samples: Mapping[str, Sample]
    ) -> RecordedTrajectory:
        trajectory = end.trajectory
        rewards = trajectory.rewards.used
        turns = []
        for agent, turn, prompt, columns in trajectory.ended_turns():
            sample = samples.get(turn.request.sample_id)
            turns.append(
                RecordedTurn(
                    turn_of(turn.request.sample_id),
                    agent,
                    prompt,
                    turn.text,
                    len(turn.prompt_tokens),
                    turn.tokens,
                    turn.logprobs,
                    turn.policy_version,
                    "length" if turn.truncated else "stop",
                    rewards.by_sample.get(turn.request.sample_id) if sample is None else sample.reward,
                    sample.advantage if sample and self._agents[agent].credit.is_group_local else None,
                    turn.request.temperature,
                    turn.version_changes,
                    columns,
                    turn.request.sample_id in trajectory.left_out,
                )
            )
        return RecordedTrajectory(
            step,
            evaluation,
            trajectory.query,
            trajectory.number,
            {str(agent): reward for agent, reward in rewards.by_agent.items()},
            trajectory.rewards.metrics,
            end.failure.error if end.failure else "",
            tuple(sorted(turns, key=lambda turn: turn.number)),
            tuple(map(_recorded_program, trajectory.programs.ended)),
            trajectory.query.data.get("metadata", {}) if trajectory.is_session else {},
        )


def asked_prompt(prompt: Prompt) -> tuple[PromptPart, ...]:
    """``prompt`` as it is now: the workflow may change its list later. A turn of the trajectory is its number, one that
    a test made by hand its text."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, Turn):
        return (_number(prompt),)
    return tuple(
        part if isinstance(part, str) else _number(part) if isinstance(part, Turn) else dict(part)
        for part in prompt
    )


def _recorded_program(end: ProgramEnd) -> RecordedProgram:
    return RecordedProgram(end.command, end.status, end.seconds, end.problem, end.output[-_KEPT_OUTPUT:])


def _number(turn: Turn) -> int | str:
    return turn_of(turn.sample_id) if turn.sample_id else turn.text
