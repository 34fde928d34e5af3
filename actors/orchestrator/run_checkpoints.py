"""The checkpoints that a run makes: each policy's state is saved by the trainer, and the joint state completes them."""

import asyncio
import copy
from collections.abc import Mapping

from ..messages import WORK_TIMEOUT_S
from ..names import PolicyName, Step
from ..run_events import CheckpointSaved, CheckpointSaving
from . import checkpoint
from .checkpoint import RunState
from .decisions import CommitCheckpoint
from .replay.replay_buffer import ReplayBuffer
from .run_parts import RunParts


class RunCheckpoints:
    """``newest``: the folder of the newest one; empty before the first."""

    def __init__(self, parts: RunParts, replay: ReplayBuffer | None) -> None:
        setup = parts.setup
        self._root, self._kept = setup.checkpoints, setup.checkpoints_kept
        self._trainer, self._console = setup.trainer.within(WORK_TIMEOUT_S), setup.console
        self._queries, self._opponents, self._replay = parts.queries, parts.opponents, replay
        self._system, self._tell_console = parts.system, parts.tell_console
        self._committing = asyncio.Lock()
        resumed = setup.resume_from
        self.newest = str(checkpoint.committed_folder(self._root, resumed.step)) if resumed else ""

    async def save(self, policy: PolicyName, step: Step) -> None:
        """Saves a policy's part of the checkpoint of ``step``."""
        folder = checkpoint.partial_folder(self._root, step) / policy
        await self._trainer.save(policy, str(folder))

    async def commit(self, decision: CommitCheckpoint, evaluations: Mapping[int, dict[str, float]]) -> None:
        """Completes the checkpoint of a step whose policies are saved. ``evaluations``: the metrics so far, by step."""
        step = decision.step
        # First those that change with later steps: the queries' state may wait for a draw.
        metrics, opponents = dict(evaluations), self._opponents.states_after(step)
        queries = await self._queries.state_after(step)
        replay = None if self._replay is None else copy.deepcopy(self._replay.state)
        state = RunState(step, decision.versions, metrics, queries, opponents, replay)
        await self._opponents.wait_kept()
        async with self._committing:
            # An answer to this means that the console has written all earlier messages, with the step's metrics: a run
            # that is resumed from this checkpoint lacks no line, even if this one is killed from here on.
            await self._console.within(WORK_TIMEOUT_S).event(CheckpointSaving(step))
            folder = await self._system().run_blocking(checkpoint.commit, self._root, state, self._kept)
        self._opponents.committed(step)
        self.newest = str(folder)
        await self._tell_console("event", CheckpointSaved(step, str(folder)))
