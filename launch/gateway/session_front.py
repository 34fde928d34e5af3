"""The gateway of a run: the launcher's actor that opens sessions for services, and carries requests to their workers.

    POST /sessions ─> a submitted query of one trajectory ─> a rollout worker begins it ─> id, url, key, expires
    a request      ─> ``carry`` of that worker, wherever it is
    rewards        ─> ``settle_session`` of that worker ─> the trajectory ends as any other

A session lives as long as its worker: if that is lost, the group begins again, and ends as lost: no other worker has
its conversation. Rewards of a session that has ended are late, and counted as such once.
"""

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

from ...actors.errors import QueriesRefused
from ...actors.gateway.model_call import ApiError
from ...actors.messages import (
    WORK_TIMEOUT_S,
    CarriedAnswer,
    CarriedRequest,
    CarrierApi,
    OrchestratorApi,
    Query,
    SessionRewards,
    SessionsApi,
    SessionTerms,
)
from ...actors.names import AgentName
from ...actors.run_events import RewardsLate, RunEvent
from ...core.actor import Actor, endpoint
from ...core.errors import ActorDead, FlexmarlError
from ...core.ref import ActorRef
from .gateway_config import GatewayConfig
from .outside_session import OutsideSession
from .session_request import SessionRequest

_KEPT_ENDED: Final = 10_000
_SETTLE_TIMEOUT_S: Final = 60.0
_TRAINED_WITHIN_S: Final = 20.0


class SessionFront(Actor, SessionsApi):
    """``key``: of services. ``agents``: of the run. ``find``: returns the orchestrator once it is there. ``notify``:
    of an event of the run. ``served``: return the workers that serve the agents of a run without sessions, once they
    are there."""

    def __init__(
        self,
        config: GatewayConfig,
        key: str,
        agents: tuple[str, ...],
        find: Callable[[], Awaitable[ActorRef[OrchestratorApi]]],
        notify: Callable[[RunEvent], None],
        served: Sequence[Callable[[], Awaitable[ActorRef[CarrierApi]]]] = (),
    ) -> None:
        self._config = config
        self._key = key.encode()
        self._agents = agents
        self._find = find
        self._notify = notify
        self._served = itertools.cycle(served) if served else None
        # Names of another life of the run are known as such: its sessions are lost, not mistyped.
        self._life = secrets.token_hex(3)
        self._open: dict[str, OutsideSession] = {}
        self._ended: OrderedDict[str, OutsideSession] = OrderedDict()
        self._by_key: dict[str, OutsideSession] = {}

    async def on_stop(self) -> None:
        for session in [*self._open.values()]:
            if session.task is not None:
                session.task.cancel()

    # ------------------------------------------------------------------ the workers' side

    @endpoint
    async def begin_session(self, session: str, worker: ActorRef[CarrierApi]) -> SessionTerms | None:
        opened = self._open.get(session)
        return None if opened is None else opened.begin(worker)

    @endpoint
    async def session_opened(self, session: str, key: str) -> None:
        if (opened := self._open.get(session)) is not None:
            opened.open(key)
            self._by_key[key] = opened

    # ------------------------------------------------------------------ the services' side

    def check_service(self, key: str) -> None:
        """Raises ApiError for another key than that of services."""
        if not secrets.compare_digest(key.encode(), self._key):
            raise ApiError(401, "the key is not the one of gateway.key_file", code="invalid_api_key")

    async def open(self, request: SessionRequest) -> OutsideSession:
        """Returns when a worker has begun the session. Raises ApiError."""
        if self._served is not None:
            raise ApiError(409, "the agents are served without training: ask /v1", code="no_sessions")
        if len(self._open) >= self._config.max_sessions:
            limit = f"gateway.max_sessions={self._config.max_sessions}"
            raise ApiError(429, f"{limit} are open: end some, or try again", code="too_many_sessions")
        query, terms = request.checked(f"{self._life}-{secrets.token_hex(8)}", self._agents, self._config)
        session = self._open[query.id] = OutsideSession(query.id, terms)
        task = session.task = asyncio.create_task(self._follow(session, query), name=f"session {query.id}")
        timeout_s = self._config.open_timeout_s
        try:
            await asyncio.wait({task, session.opened}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not session.opened.done():
                session.end("refused", f"no rollout worker has begun it within {timeout_s:g} s")
                task.cancel()
        if not session.opened.done():
            raise ApiError(503, f"the session does not begin: {session.reason}", code="not_begun")
        return session

    async def _follow(self, session: OutsideSession, query: Query) -> None:
        """Submits the session's query, and notes its end."""
        try:
            orchestrator = (await self._find()).within(WORK_TIMEOUT_S)
            (answer,) = await orchestrator.submit([query], True, sessions=True)
            session.answer(answer)
        except QueriesRefused as error:
            session.end("refused" if session.state == "opening" else "lost", str(error))
        except FlexmarlError as error:
            session.end("lost", f"the run has ended, or continues from a checkpoint: {error}")
        finally:
            session.end("lost", "the run has ended")
            del self._open[session.name]
            self._by_key.pop(session.key, None)
            self._ended[session.name] = session
            if len(self._ended) > _KEPT_ENDED:
                self._ended.popitem(last=False)

    def session(self, name: str) -> OutsideSession:
        """The session of that name, also one that has ended. Raises ApiError."""
        session = self._open.get(name) or self._ended.get(name)
        if session is not None:
            return session
        if not name.startswith(f"{self._life}-") and name.count("-") == 1:
            problem = "of another life of the run: it continued from a checkpoint, and such sessions are lost"
            raise ApiError(410, f"the session {name} is {problem}", code="session_ended")
        raise ApiError(404, f"there is no session {name}", code="session_not_found")

    async def settle(self, name: str, rewards: SessionRewards | None) -> OutsideSession:
        """Ends a session with rewards, or without any. Returns it once its fate is known, or after a while. Raises
        ApiError."""
        session = self.session(name)
        if session.has_ended:
            self._count_late(session, rewards)
            raise _end_error(session)
        if session.worker is None or session.task is None:
            raise ApiError(409, f"the session {name} is not open yet", code="not_begun")
        try:
            problem = await session.worker.within(_SETTLE_TIMEOUT_S).settle_session(name, rewards)
        except ActorDead:
            self._lose(session)
            self._count_late(session, rewards)
            raise _end_error(session) from None
        if problem:
            raise ApiError(422, problem, code="invalid_rewards")
        await asyncio.wait({session.task}, timeout=_TRAINED_WITHIN_S)
        return session

    def _count_late(self, session: OutsideSession, rewards: SessionRewards | None) -> None:
        if rewards is not None and not session.has_late_rewards and session.state not in ("rewarded", "late"):
            session.has_late_rewards = True
            for agent in self._agents:
                of_agent = agent in rewards.agents or rewards.team is not None or bool(rewards.turns)
                if of_agent:
                    self._notify(RewardsLate(AgentName(agent), 1, session.name))

    def _lose(self, session: OutsideSession) -> None:
        session.end("lost", "its rollout worker was lost")

    # ------------------------------------------------------------------ the programs' side

    async def session_of_call(self, name: str | None, key: str) -> OutsideSession:
        """The session that a program's request is for, by its URL, or by the key alone. Raises ApiError."""
        if self._served is not None and name is None:
            self.check_service(key)
            terms = SessionTerms({}, self._config.session_s)
            return OutsideSession("", terms, "open", await next(self._served)(), key)
        of_key = self._by_key.get(key)
        if name is None:
            if of_key is None:
                raise ApiError(401, "the key is of no open session", code="invalid_api_key")
            return of_key
        session = self.session(name)
        if session.has_ended:
            raise _end_error(session)
        if not session.key or not secrets.compare_digest(key.encode(), session.key.encode()):
            raise ApiError(401, f"the key is not the one of session {name}", code="invalid_api_key")
        return session

    async def carry(self, session: OutsideSession, request: CarriedRequest) -> AsyncGenerator[CarriedAnswer]:
        """The worker's answer to a program's request. Raises ApiError if the worker is lost before its first part."""
        assert session.worker is not None, "the session is open"
        begun = False
        try:
            async for part in session.worker.within(WORK_TIMEOUT_S).carry(request):
                yield part
                begun = True
        except ActorDead:
            self._lose(session)
            if not begun:
                raise _end_error(session) from None
            raise


def _end_error(session: OutsideSession) -> ApiError:
    ended = f"the session {session.name} has ended, {session.state}: {session.reason}"
    return ApiError(410, ended, code="session_ended")
