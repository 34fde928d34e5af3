"""The gateway of a run: the launcher's actor that opens sessions for services, and carries requests to their workers.

    POST /sessions ─> a submitted query of one trajectory ─> a rollout worker begins it ─> id, url, key, expires
    a request      ─> ``carry`` of that worker, wherever it is
    rewards        ─> ``settle_session`` of that worker ─> the trajectory ends as any other

A session lives as long as its worker: if that is lost, the group begins again, and ends as lost: no other worker has
its conversation. Rewards of a session that has ended are late, and counted as such once.
"""

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from ...actors.errors import QueriesRefused
from ...actors.gateway.model_call import ApiError
from ...actors.messages import (
    WORK_TIMEOUT_S,
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
from .call_route import CallRoute, carry
from .gateway_config import GatewayConfig
from .outside_session import OutsideSession
from .service_key import check_key
from .session_request import SessionRequest

_KEPT_ENDED: Final = 10_000
_SETTLE_TIMEOUT_S: Final = 60.0
_TRAINED_WITHIN_S: Final = 20.0
_WITH_REWARDS: Final = ("ending", "rewarded", "late")


class SessionFront(Actor, SessionsApi):
    """``key``: of services. ``agents``: of the run. ``find``: returns the orchestrator once it is there. ``notify``:
    of an event of the run."""

    def __init__(
        self,
        config: GatewayConfig,
        key: str,
        agents: tuple[str, ...],
        find: Callable[[], Awaitable[ActorRef[OrchestratorApi]]],
        notify: Callable[[RunEvent], None],
    ) -> None:
        self._config = config
        self._key = key.encode()
        self._agents = agents
        self._find = find
        self._notify = notify
        # Names of another life of the run are known as such: its sessions are lost, not mistyped.
        self._life = secrets.token_hex(3)
        self._open: dict[str, OutsideSession] = {}
        self._ended: OrderedDict[str, OutsideSession] = OrderedDict()
        self._by_key: dict[str, OutsideSession] = {}
        """Also those that have ended."""
        self._is_stopping = False

    async def on_stop(self) -> None:
        for session in [*self._open.values()]:
            if session.task is not None:
                session.task.cancel()

    # ------------------------------------------------------------------ the workers' side

    @endpoint
    async def begin_session(self, session: str, worker: ActorRef[CarrierApi]) -> SessionTerms | None:
        opened = self._open.get(session)
        # One that is begun now would hold its step for all of its life.
        return None if opened is None or self._is_stopping else opened.begin(worker)

    @endpoint
    async def session_opened(self, session: str, key: str) -> bool:
        opened = self._open.get(session)
        if opened is None or not opened.open(key):
            return False
        self._by_key[key] = opened
        return True

    @endpoint
    async def run_stops(self) -> None:
        self.background(self._lose_open(), "end of the sessions of a run that stops")

    async def _lose_open(self) -> None:
        """Ends the open sessions: a step may wait for them, and their services for hours."""
        await asyncio.sleep(self._config.stop_s)
        self._is_stopping = True
        workers = {session.worker for session in self._open.values() if session.worker is not None}
        calls = (
            worker.within(_SETTLE_TIMEOUT_S).lose_sessions("the run is being stopped") for worker in workers
        )
        # A worker that is lost has lost its sessions.
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, FlexmarlError):
                raise error

    # ------------------------------------------------------------------ the services' side

    def check_service(self, key: str) -> None:
        """Raises ApiError for another key than that of services."""
        check_key(key, self._key)

    async def open(self, request: SessionRequest) -> OutsideSession:
        """Returns when a worker has begun the session. Raises ApiError."""
        if len(self._open) >= self._config.max_sessions:
            limit = f"gateway.max_sessions={self._config.max_sessions}"
            problem = f"{limit} are open: end some, or try again"
            raise ApiError(429, problem, code="too_many_sessions", retry_s=1)
        query, terms = request.checked(f"{self._life}-{secrets.token_hex(8)}", self._agents, self._config)
        session = self._open[query.id] = OutsideSession(query.id, terms)
        task = session.task = asyncio.create_task(self._follow(session, query), name=f"session {query.id}")
        timeout_s = self._config.open_timeout_s
        try:
            await asyncio.wait({task, session.opened}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if session.opened.done():  # the service has gone, and does not get its key
                self.background(self._close(session), f"end of session {session.name}")
            raise
        finally:
            if not session.opened.done():
                session.end("refused", f"no rollout worker has begun it within {timeout_s:g} s")
                task.cancel()
        if not session.opened.done():
            raise ApiError(503, f"the session does not begin: {session.reason}", code="not_begun", retry_s=1)
        return session

    async def _close(self, session: OutsideSession) -> None:
        with contextlib.suppress(ApiError):
            await self.settle(session.name, None)

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
            self._ended[session.name] = session
            if len(self._ended) > _KEPT_ENDED:
                _, forgotten = self._ended.popitem(last=False)
                self._by_key.pop(forgotten.key, None)

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
        if session.worker is None or session.task is None or session.state == "opening":
            raise ApiError(409, f"the session {name} is not open yet", code="not_begun")
        if session.state == "ending":
            raise ApiError(
                409, f"the session {name} has its rewards, or its end, already", code="session_ending"
            )
        try:
            problem = await session.worker.within(_SETTLE_TIMEOUT_S).settle_session(name, rewards)
        except ActorDead:
            session.lose()
            problem = None
        except FlexmarlError as error:
            raise ApiError(502, f"the session's rollout worker: {error}", code="worker_failed") from error
        if problem:
            raise ApiError(422, problem, code="invalid_rewards")
        if problem == "":
            session.settle()
        await asyncio.wait({session.task}, timeout=_TRAINED_WITHIN_S)
        if problem is None:  # it has ended before
            self._count_late(session, rewards)
            raise _end_error(session)
        return session

    def _count_late(self, session: OutsideSession, rewards: SessionRewards | None) -> None:
        if rewards is not None and not session.has_late_rewards and session.state not in _WITH_REWARDS:
            session.has_late_rewards = True
            for agent in self._agents:
                of_agent = agent in rewards.agents or rewards.team is not None or bool(rewards.turns)
                if of_agent:
                    self._notify(RewardsLate(AgentName(agent), 1, session.name))

    # ------------------------------------------------------------------ the programs' side

    async def route(self, name: str | None, key: str) -> CallRoute:
        """See ``front_app.Calls``. The session is that of the URL, or of the key alone."""
        session = self._by_key.get(key) if name is None else self.session(name)
        if session is None:
            raise ApiError(401, "the key is of no session", code="invalid_api_key")
        if not session.key or not secrets.compare_digest(key.encode(), session.key.encode()):
            raise ApiError(401, f"the key is not the one of session {name}", code="invalid_api_key")
        if session.state != "open":
            raise _end_error(session)
        assert session.worker is not None, "the session is open"

        def lose() -> ApiError:
            session.lose()
            return _end_error(session)

        return CallRoute(f"/sessions/{session.name}", session.key, partial(carry, session.worker, lose))


def _end_error(session: OutsideSession) -> ApiError:
    if session.has_ended:
        fate = f"{session.state}: {session.reason}"
    elif session.state == "ending":
        fate = "and its rewards are taken"
    else:
        fate = "and how is not known yet"
    ended = f"the session {session.name} has ended, {fate}"
    return ApiError(410, ended, code="session_ended")
