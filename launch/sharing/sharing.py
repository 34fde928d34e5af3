"""Trains groups of other runs: follows each peer, and gives each step a share of the groups that have come.

    peer's control ─> shared groups ─> SharedPool ─> tokens by this run's tokenizers ─> orchestrator: submit_logged
                                           │
    this run's steps ──────────────────────┘

A peer may come and go: one that can't be reached is looked for. None of its errors ends this run.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from ...actors.errors import QueriesRefused
from ...actors.messages import WORK_TIMEOUT_S, LoggedGroup, OrchestratorApi
from ...actors.run_events import PeerChanged
from ...core.base.texts import text_of
from ...core.errors import FlexmarlError
from ...core.ref import ActorRef
from ...core.system import ActorSystem
from ..config.run_config import RunConfig
from ..errors import RunUnreachable, SharingRefused
from ..monitoring.console.run_console import RunConsole
from ..run.connected_run import connect
from ..run.logged_lines import LogReader
from ..run.run_feed import Broadcast
from .shared_group import SharedGroup, Task, task_of
from .shared_pool import SharedPool, WaitingGroup

_AGAIN_S: Final = 2.0
_ANSWER_S: Final = 30.0
_MOST_SUBMITTED: Final = 2
"""Submissions under way: one may wait for the end of a step while the next step takes another."""


class Sharing:
    """The part of a run with ``sharing.peers`` that follows them and feeds its steps."""

    def __init__(
        self, config: RunConfig, system: ActorSystem, console: RunConsole, broadcast: Broadcast
    ) -> None:
        """``system``: the launcher's."""
        self._config, self._system, self._console, self._broadcast = config, system, console, broadcast
        self._pool = SharedPool(config.sharing, config.training.queries_per_step, config.seed)
        self._reader = LogReader(config, needs_origin=False)
        self._dropped: set[str] = set()
        """Peers of whose groups one could not be trained."""

    async def run(self, orchestrator: ActorRef[OrchestratorApi]) -> None:
        """Runs until it is cancelled. Raises OSError if the recipe can't be read."""
        task = await self._system.run_blocking(task_of, self._config)
        async with asyncio.TaskGroup() as tasks:
            for peer in self._config.sharing.peers:
                tasks.create_task(self._follow(peer, task), name=f"peer {peer}")
            await self._feed(orchestrator, tasks)

    async def _follow(self, peer: str, task: Task) -> None:
        """Takes the groups of a peer. Returns if it refuses."""
        after: int | None = None
        is_reported = False
        while True:
            joined = False
            try:
                async with (
                    connect(self._config.sharing.peers[peer].file) as run,
                    aclosing(run.shared_groups(task, after)) as groups,
                ):
                    await _answer(groups)
                    joined, is_reported = True, False
                    await self._report(peer, "joined")
                    # Heartbeats end this stream if the peer hangs. One that has no group for long is in order.
                    async for group in groups:
                        after = group.number
                        self._pool.add(peer, group, self._broadcast.last_step)
                reason = "its run has ended"
            except SharingRefused as refusal:
                await self._report(peer, "refused", refusal.problem)
                return
            except (FlexmarlError, OSError) as error:
                reason = text_of(error)
            if not is_reported:
                is_reported = True
                await self._report(peer, "lost" if joined else "absent", reason)
            await asyncio.sleep(_AGAIN_S)

    async def _feed(self, orchestrator: ActorRef[OrchestratorApi], tasks: asyncio.TaskGroup) -> None:
        """Submits groups once in each step."""
        submitted: set[asyncio.Task[None]] = set()
        fed = -1
        while True:
            changed = self._broadcast.changes.next
            if self._broadcast.last_step > fed and len(submitted) < _MOST_SUBMITTED:
                fed = self._broadcast.last_step
                if groups := self._pool.take(fed):
                    task = tasks.create_task(self._submit(groups, orchestrator), name="shared groups")
                    submitted.add(task)
                    task.add_done_callback(submitted.discard)
            await changed.wait()

    async def _submit(self, groups: list[WaitingGroup], orchestrator: ActorRef[OrchestratorApi]) -> None:
        read = [group for waiting in groups for group in await self._read(waiting)]
        try:
            if read:
                await orchestrator.within(WORK_TIMEOUT_S).submit_logged(read)
        except FlexmarlError:  # the run ends: no further step begins
            return

    async def _read(self, waiting: WaitingGroup) -> list[LoggedGroup]:
        """The group by this run's tokenizers; none if it can't be trained."""
        agents, name = self._config.trained_agents, waiting.group.name(waiting.origin)
        lines = [_of_agents(line, agents.__contains__) | {"query": name} for line in waiting.group.lines]
        try:
            groups = await self._system.run_blocking(self._reader.groups, lines)
        except QueriesRefused as refusal:
            if waiting.origin not in self._dropped:
                self._dropped.add(waiting.origin)
                await self._report(waiting.origin, "dropped", text_of(refusal))
            return []
        return [
            replace(group, query=replace(group.query, data={**group.query.data, "origin": waiting.origin}))
            for group in groups
        ]

    async def _report(self, peer: str, state: Any, reason: str = "") -> None:
        await self._console.event(PeerChanged(peer, state, reason))


async def _answer(groups: AsyncGenerator[SharedGroup]) -> None:
    """Takes the first item, which says that the peer shares. Raises RunUnreachable if it does not come in time."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await anext(groups, None)
    except TimeoutError:
        raise RunUnreachable(
            f"it has not said within {_ANSWER_S:g} s whether it shares: its disk may hang"
        ) from None


def _of_agents(line: dict[str, Any], trained: Callable[[str], bool]) -> dict[str, Any]:
    """The part of a line that is of agents which this run trains."""
    return {
        "turns": [turn for turn in line["turns"] if trained(turn["agent"])],
        "reward": {agent: reward for agent, reward in line["reward"].items() if trained(agent)},
    }
