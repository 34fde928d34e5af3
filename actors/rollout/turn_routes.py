"""The rollout actor's session with the router: asks for the instances of its turns, and reports their ends."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final, NamedTuple

from ...core.errors import CANCELLED, ActorDead, RemoteError, is_loss
from ...core.ref import ActorRef
from ..errors import WrongVersion
from ..messages import WORK_TIMEOUT_S, InstanceApi, RouterApi, RouteRequest, Routes, TurnEnded, VersionRange
from ..names import PolicyName, Version

_LINGER_S: Final = 0.002
"""Ends of turns are sent with the next turn that asks, at the latest after this: an instance has turns in reserve."""
_IDLE_LINGER_S: Final = 0.01
"""The same while no turn of this worker waits for an instance. Sending a message of its own for each end, with the note
that it was processed, takes as much time as asking for a route."""


class TurnRoute(NamedTuple):
    """The way of a turn that has been asked for. Its end must be reported. ``version_s`` and ``queue_s``: see
    ``RouteAssigned``."""

    turn: int
    instance: ActorRef[InstanceApi]
    version: Version
    version_s: float
    queue_s: float


class TurnRoutes:
    """Messages of one round of the event loop travel together."""

    def __init__(self, router: ActorRef[RouterApi], name: str) -> None:
        """``name``: of the rollout actor."""
        self._router = router
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._stream: AsyncIterator[Routes] = router.within(WORK_TIMEOUT_S).routes(name)
        self._session = 0
        self._turns = 0
        self._waiting: dict[int, tuple[asyncio.Future[TurnRoute], PolicyName, VersionRange]] = {}
        self._instances: dict[int, ActorRef[InstanceApi]] = {}
        self._requests: list[RouteRequest] = []
        self._ended: list[TurnEnded] = []
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.Handle | None = None
        self._later_s = self._ends_due_s = 0.0
        """The times of ``_later``, and at which ``_ended`` is sent at the latest."""

    async def open(self) -> None:
        """Opens the session. Raises ActorDead if the router can't be reached."""
        first = await anext(self._stream)
        assert first.session is not None, "the first item of the stream"
        self._session = first.session

    async def run(self) -> None:
        """Passes routes on, until the router is stopped in good order. Raises ActorDead if it is lost, or has given up
        this actor: it has forgotten all turns then, and no route would ever come."""
        try:
            async for routes in self._stream:
                self._take(routes)
        except ActorDead as dead:
            if not dead.stopped:
                raise
        except RemoteError as error:
            if error.kind != CANCELLED:
                raise
            reason = f"{self._router.name} has given it up for its silence"
            raise ActorDead(self._name, reason) from error

    def _take(self, routes: Routes) -> None:
        self._instances |= routes.instances
        for turn, number, version, version_s, queue_s in routes.routed:
            if (waiting := self._waiting.pop(turn, None)) is not None and not waiting[0].done():
                route = TurnRoute(turn, self._instances[number], version, version_s, queue_s)
                waiting[0].set_result(route)
        for turn, served in routes.refused:
            if (waiting := self._waiting.pop(turn, None)) is not None and not waiting[0].done():
                future, policy, versions = waiting
                future.set_exception(WrongVersion(policy, versions.oldest, served))

    def close(self) -> None:
        """Cancels messages that have not been sent: the router forgets the turns when the session's stream ends."""
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()

    async def route(
        self,
        policy: PolicyName,
        versions: VersionRange,
        *,
        prompt_tokens: int,
        downstream_tokens: float = 0.0,
        prefix: str = "",
        topic: str = "",
    ) -> TurnRoute:
        """Waits for an instance of ``policy`` that serves one of ``versions``. The arguments are those of
        ``RouteRequest``. Raises WrongVersion if no instance ever will."""
        self._turns += 1
        turn = self._turns
        future: asyncio.Future[TurnRoute] = self._loop.create_future()
        self._waiting[turn] = (future, policy, versions)
        self._requests.append(
            RouteRequest(
                turn,
                policy,
                versions.oldest,
                versions.newest,
                prompt_tokens,
                downstream_tokens,
                prefix,
                topic,
            )
        )
        self._send_soon()
        try:
            return await future
        except asyncio.CancelledError:
            self.ended(turn, 0)
            raise

    def ended(self, turn: int, tokens: int, *, lost: bool = False) -> None:
        """Reports the end of a turn; see ``TurnEnded``."""
        self._waiting.pop(turn, None)
        linger_s = _LINGER_S if self._waiting or lost else _IDLE_LINGER_S
        due_s = self._loop.time() + linger_s
        self._ends_due_s = min(self._ends_due_s, due_s) if self._ended else due_s
        self._ended.append(TurnEnded(turn, tokens, lost))
        if self._later is not None and self._ends_due_s < self._later_s:
            self._later.cancel()
            self._later = None
        if self._later is None:
            self._send_later()

    def _send_later(self) -> None:
        self._later_s = self._ends_due_s
        self._later = self._loop.call_at(self._later_s, self._send_ended)

    def _send_ended(self) -> None:
        """Sends the ends that no turn has taken along meanwhile. The timer is not cancelled then: setting it again for
        each turn would cost more than firing in vain."""
        self._later = None
        if not self._ended or self._soon is not None:
            return
        if self._later_s < self._ends_due_s:  # the ends that it was set for have left with a turn
            self._send_later()
        else:
            self._send()

    def _send_soon(self) -> None:
        """Sends at the end of this round of the event loop."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._soon = None
        requests, self._requests = self._requests, []
        ended, self._ended = self._ended, []
        # Not awaited: without credit they wait in order.
        if requests:
            answer = self._router.ask("turns", self._session, requests, ended, timeout_s=WORK_TIMEOUT_S)
            answer.add_done_callback(partial(self._take_answer, requests))
        else:
            sent = self._router.tell("turns", self._session, requests, ended, timeout_s=WORK_TIMEOUT_S)
            sent.add_done_callback(_error_of)

    def _take_answer(self, requests: list[RouteRequest], answer: "asyncio.Future[Routes]") -> None:
        if (error := _error_of(answer)) is None:
            self._take(answer.result())
        elif not is_loss(error):  # else the stream ends with it, and this actor
            for request in requests:
                if (waiting := self._waiting.pop(request.turn, None)) is not None and not waiting[0].done():
                    waiting[0].set_exception(error)


def _error_of(sent: "asyncio.Future[Any]") -> BaseException | None:
    return asyncio.CancelledError() if sent.cancelled() else sent.exception()
