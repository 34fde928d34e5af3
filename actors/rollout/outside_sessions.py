"""Sessions that programs outside the run have opened at its gateway, and that this worker plays.

    begin ─> the gateway gives its address to the program ─> calls ─┬─> rewards: the trajectory ends as any other
                                                                    ├─> closed, or expired: it is late
                                                                    └─> this worker dies: lost, it never begins again

Requests come by messages of the gateway, so that a session is reached on every host, by the run's one address.
"""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from ...core.ref import ActorRef
from ..columns.declared_columns import outside_reward
from ..errors import InvalidReward, RecipeError, SessionUnrewarded
from ..gateway.server import GatewayServer
from ..gateway.session import Session, TrainRule
from ..messages import (
    CarrierApi,
    SessionRewards,
    SessionsApi,
    SessionTerms,
)
from ..names import AgentName
from ..workflow import Agents, Rewards, Turn
from .rollout_setup import RolloutAgent
from .trajectory import Trajectory
from .trajectory_rewards import trajectory_rewards, unknown_agent

_ANSWER_TIMEOUT_S: Final = 300.0
LIMIT: Final = "gateway.session_s"


@dataclass(frozen=True, slots=True)
class _Open:
    """``train``: see ``SessionTerms``."""

    session: Session
    trajectory: Trajectory
    train: Mapping[str, TrainRule]
    end: "asyncio.Future[Rewards]"


class OutsideSessions:
    """The open ones, by name: the id of the query."""

    def __init__(
        self,
        front: ActorRef[SessionsApi] | None,
        server: GatewayServer,
        agents: Mapping[AgentName, RolloutAgent],
        worker: ActorRef[CarrierApi],
    ) -> None:
        """``front``: the run's gateway."""
        self._front = front
        self._server = server
        self._agents = agents
        self._worker = worker
        self._open: dict[str, _Open] = {}

    async def play(self, trajectory: Trajectory, agents: Agents) -> Rewards:
        """Is the workflow of a session. Raises SessionUnrewarded."""
        assert self._front is not None, "only the gateway submits sessions"
        front, name = self._front.within(_ANSWER_TIMEOUT_S), trajectory.query.id
        terms = await front.begin_session(name, self._worker)
        if terms is None:
            raise SessionUnrewarded("lost", "its rollout worker was lost, or its service has not waited")
        async with self._enter(trajectory, agents, terms) as opened:
            if not await front.session_opened(name, opened.session.key):
                raise SessionUnrewarded("lost", "its service has not waited")
            trajectory.judge_limit = f"its lives_s={terms.lives_s:g}"
            # Not ``asyncio.timeout``: it would cancel this task although ``settle`` has taken rewards in the same turn
            # of the loop, and said so.
            await asyncio.wait({opened.end}, timeout=terms.lives_s)
            if not opened.end.done():
                raise SessionUnrewarded("expired", f"no rewards within {terms.lives_s:g} s")
            return opened.end.result()

    @asynccontextmanager
    async def _enter(
        self, trajectory: Trajectory, agents: Agents, terms: SessionTerms
    ) -> AsyncGenerator[_Open]:
        name = trajectory.query.id
        async with self._server.opened(agents, terms.models, trajectory.programs, name) as session:
            opened = _Open(session, trajectory, terms.train, asyncio.get_running_loop().create_future())
            self._open[name] = opened
            try:
                yield opened
            finally:
                del self._open[name]
                opened.end.cancel()

    def settle(self, name: str, rewards: SessionRewards | None) -> str | None:
        """See ``CarrierApi.settle_session``. From here on no turn is added to the trajectory: one that ended before the
        session does could lack a reward, which would end the run."""
        opened = self._open.get(name)
        if opened is None or opened.end.done():
            return None
        if opened.session.error is not None:
            opened.end.set_exception(opened.session.error)
            return f"the session has failed: {opened.session.error}"
        try:
            returned = self._check(opened, rewards)
        except (InvalidReward, RecipeError) as error:
            return str(error)
        opened.trajectory.close()
        opened.session.leave_out(opened.train)
        if returned is None:
            opened.end.set_exception(SessionUnrewarded("closed", "the program has closed it without rewards"))
        else:
            opened.end.set_result(returned)
        return ""

    def lose(self, reason: str) -> None:
        """See ``CarrierApi.lose_sessions``."""
        for opened in self._open.values():
            if not opened.end.done():
                opened.end.set_exception(SessionUnrewarded("lost", reason))

    def _check(self, opened: _Open, rewards: SessionRewards | None) -> Rewards | None:
        """The rewards as a workflow returns them; None for a session that is closed without any. Raises InvalidReward
        and RecipeError for those that no trajectory may have."""
        left_out = opened.session.untrained(opened.train) | opened.session.programs.left_out
        ended = opened.trajectory.turns_to_reward()
        turns = [turn for turn in ended if turn.sample_id not in left_out]
        outside = {
            turn.sample_id: math.nan
            for turn in turns
            if outside_reward(self._agents[turn.agent].columns) is not None
        }
        judged = bool(turns) and len(outside) == len(turns)
        if rewards is None:
            return Rewards() if judged else None  # the judge of the columns gives them
        if not turns:
            raise InvalidReward("the session has no turn that has ended and is trained")
        for agent in rewards.agents:
            if agent not in self._agents:
                raise unknown_agent(agent, self._agents, "the service rewards")
        trajectory_rewards(
            opened.trajectory.name,
            _rewards(rewards, opened.session),
            ended,
            self._agents,
            punish=False,
            outside=dict.fromkeys(outside, 0.0),
            left_out=left_out,
        )
        return _rewards(rewards, opened.session)


def _rewards(rewards: SessionRewards, session: Session) -> Rewards:
    """Raises InvalidReward."""
    result = Rewards(metrics=rewards.metrics, **rewards.agents)
    if rewards.team is not None:
        result.of_team(rewards.team)
    for of_turn in rewards.turns:
        result.of(_turn(of_turn.turn, session), of_turn.reward)
    return result


def _turn(name: int | str, session: Session) -> Turn:
    """The turn with this number, or whose answer has this id: an API's prefix, and the call's id."""
    if isinstance(name, int):
        choices = session.turns[name : name + 1] if name >= 0 else []
    else:
        choices = session.turns_of_calls.get(re.split("[-_]", name)[-1], [])
    if len(choices) == 1:
        return choices[0]
    if choices:
        raise InvalidReward(f"turn {name!r}: the answer has {len(choices)} choices: name each by its number")
    turns = len(session.turns)
    raise InvalidReward(f"turn {name!r}: the session has {turns} turns that have ended, numbered from 0")
