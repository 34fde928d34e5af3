"""Messages of sessions that programs outside the run open: between the run's gateway and rollout workers."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ...core.actor import endpoint
from ...core.ref import ActorRef


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """``models``: further names of agents, as the program asks for them. ``lives_s``: seconds after which the session
    expires. ``train``: the turns of each agent that are trained, see ``open_gateway``; without one, all."""

    models: dict[str, str]
    lives_s: float
    train: dict[str, Literal["all", "main"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionTurnReward:
    """``turn``: its number among the session's turns, from 0 in the order of their ends, or the id of its answer, if
    that has one choice."""

    turn: int | str
    reward: float


@dataclass(frozen=True, slots=True)
class SessionRewards:
    """The rewards that end a session: of agents, of the team, of single turns; ``metrics`` are for people."""

    agents: dict[str, float] = field(default_factory=dict)
    team: float | None = None
    turns: list[SessionTurnReward] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CarriedRequest:
    """A request of a program, as HTTP has it. ``path``: ``/sessions/...``; of served agents, ``/v1/...``."""

    method: str
    path: str
    headers: list[tuple[str, str]] = field(repr=False)
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CarriedAnswer:
    """A part of the answer: the first has its ``status`` and ``headers``, later ones more of its ``body``."""

    body: bytes = b""
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)


class CarrierApi(Protocol):
    """A rollout worker that has sessions."""

    @endpoint
    def carry(self, request: CarriedRequest) -> AsyncGenerator[CarriedAnswer]:
        """Answers a request to one of its sessions. The end of the stream ends the request."""

    async def settle_session(self, session: str, rewards: SessionRewards | None) -> str | None:
        """Ends a session with these rewards, or without any. Empty if they are taken; else the reason for which they
        are not. None: it has ended before."""

    async def lose_sessions(self, reason: str) -> None:
        """Ends all of its sessions that have not ended, as lost for that reason."""


class SessionsApi(Protocol):
    """The gateway of a run."""

    async def begin_session(self, session: str, worker: ActorRef[CarrierApi]) -> SessionTerms | None:
        """A worker has got the session. None: it is no longer wanted, or another worker had it and is lost."""

    async def session_opened(self, session: str, key: str) -> bool:
        """The session can be asked, with this key. False: it is no longer wanted."""

    async def run_stops(self) -> None:
        """The run ends after the steps under way: see ``gateway.stop_s``."""
