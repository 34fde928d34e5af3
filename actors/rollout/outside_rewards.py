"""Rewards that a program outside the run gives: a worker's samples that wait for theirs.

    a workflow returns ─> its samples are offered by the store ─> a judge writes their rewards ─> the trajectory ends

A trajectory waits for at most ``timeout_s`` of its agent's column ``reward``, or for the shorter
``rollout.late_rewards_after_s``; then it fails, or is late. An evaluation has the first limit alone. After a restart of
the store all samples that wait are offered again.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, Final

import numpy as np

from ...core.errors import CANCELLED, ActorDead, RemoteError
from ...core.ref import ActorRef
from ..columns.column_refs import inline_array
from ..columns.declared_columns import Column, outside_reward
from ..columns.store_client import through_restarts
from ..errors import NotJudged
from ..messages import WORK_TIMEOUT_S, StoreApi, UnjudgedSample
from ..names import AgentName
from ..sample_id import turn_of
from .resumable_turn import ResumableTurn
from .rollout_setup import RolloutAgent
from .trajectory import Trajectory

_OFFER_TIMEOUT_S: Final = 300.0


class OutsideRewards:
    """Does nothing if the workflow gives the rewards of all ``agents``."""

    def __init__(
        self,
        store: ActorRef[StoreApi],
        writer: str,
        agents: Mapping[AgentName, RolloutAgent],
        late_after_s: float | None = None,
    ) -> None:
        """``writer``: this life of the worker. ``late_after_s``: the setting of that name."""
        self._store = store
        self._late_after_s = math.inf if late_after_s is None else late_after_s
        self._writer = writer
        self._columns: dict[AgentName, Column] = {
            agent: column
            for agent, settings in agents.items()
            if (column := outside_reward(settings.columns)) is not None
        }
        self._of_turns = {
            agent for agent in self._columns if agents[agent].credit.used_rewards in ("turn", "both")
        }
        self._numbers = count()
        self._waiting: dict[str, tuple[UnjudgedSample, asyncio.Future[float]]] = {}

    @property
    def limit(self) -> str:
        """The settings that end the waits, for people."""
        return ", ".join(
            dict.fromkeys(self._limit_of(agent, is_evaluation=False)[1] for agent in self._columns)
        )

    def _limit_of(self, agent: AgentName, *, is_evaluation: bool) -> tuple[float, str]:
        """The seconds, and the setting."""
        timeout_s = self._columns[agent].timeout_s
        if self._late_after_s < timeout_s and not is_evaluation:
            return self._late_after_s, f"rollout.late_rewards_after_s={self._late_after_s:g}"
        return timeout_s, f"agents.{agent}.columns.reward.timeout_s={timeout_s:g}"

    async def run(self) -> None:
        """Takes rewards until the store is stopped in good order. Raises ActorDead if it is lost for good."""
        while self._columns:
            try:
                async for rewards in self._store.within(WORK_TIMEOUT_S).outside_rewards(self._writer):
                    self._take(rewards)
                return
            except ActorDead as dead:
                if dead.stopped:
                    return
            except RemoteError as error:
                if error.kind != CANCELLED:  # else the store has given this worker up for its silence
                    raise
            await self._offer([sample for sample, _ in self._waiting.values()])

    def _take(self, rewards: Mapping[str, float]) -> None:
        for name, reward in rewards.items():
            if (waiting := self._waiting.get(name)) is not None and not waiting[1].done():
                waiting[1].set_result(reward)

    async def of(self, trajectory: Trajectory) -> dict[str, float]:
        """Waits for the rewards of a trajectory whose workflow has returned, by sample id. Raises NotJudged."""
        samples = self._samples(trajectory)
        if not samples:
            return {}
        loop = asyncio.get_running_loop()
        futures: dict[str, asyncio.Future[float]] = {}
        for sample in samples:
            futures[sample.sample_id] = loop.create_future()
            self._waiting[sample.sample_id] = sample, futures[sample.sample_id]
        began = loop.time()
        try:
            await self._offer(samples)
            if not all(future.done() for future in futures.values()):
                trajectory.awaits_rewards()
            limits = {
                sample.sample_id: self._limit_of(
                    AgentName(sample.agent), is_evaluation=trajectory.is_evaluation
                )
                for sample in samples
            }
            for sample in sorted(samples, key=lambda candidate: limits[candidate.sample_id][0]):
                limit_s, limit = limits[sample.sample_id]
                left_s = began + limit_s - loop.time()
                await asyncio.wait([futures[sample.sample_id]], timeout=max(0.0, left_s))
                if not futures[sample.sample_id].done():
                    raise NotJudged(sample.agent, sample.sample_id, limit)
            return {name: future.result() for name, future in futures.items()}
        finally:
            for name in futures:
                del self._waiting[name]
            self._withdraw([*futures])

    def _samples(self, trajectory: Trajectory) -> list[UnjudgedSample]:
        """Every turn of an agent whose turns have rewards of their own; else the last turn of the trajectory."""
        samples: dict[tuple[AgentName, int], UnjudgedSample] = {}
        turns = sorted(trajectory.ended_turns(), key=lambda ended: _number(ended[1])) if self._columns else ()
        for agent, turn, _, columns in turns:
            if agent in self._columns and turn.request.sample_id not in trajectory.left_out:
                key = agent, _number(turn) if agent in self._of_turns else -1
                samples[key] = UnjudgedSample(
                    turn.request.sample_id,
                    agent,
                    next(self._numbers),
                    turn.policy_version,
                    _plain(
                        {
                            "text": turn.text,
                            "query_text": trajectory.query.text,
                            "temperature": turn.request.temperature,
                            "prompt_tokens": np.asarray(turn.prompt_tokens, np.int32),
                            "tokens": np.asarray(turn.tokens, np.int32),
                            **columns,
                        }
                    ),
                )
        return [*samples.values()]

    async def _offer(self, samples: Iterable[UnjudgedSample]) -> None:
        store, offers = self._store.within(_OFFER_TIMEOUT_S), [*samples]
        await through_restarts(lambda: store.offer(self._writer, offers))

    def _withdraw(self, sample_ids: list[str]) -> None:
        """Not awaited. If the store dies first, it forgets offers; a later one of the same name has another number."""
        sent = self._store.tell("withdraw", self._writer, sample_ids, timeout_s=_OFFER_TIMEOUT_S)
        sent.add_done_callback(lambda done: None if done.cancelled() else done.exception())


def _number(turn: ResumableTurn) -> int:
    return turn_of(turn.request.sample_id)


def _plain(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: inline_array(value) if isinstance(value, np.ndarray) else value
        for name, value in columns.items()
    }
