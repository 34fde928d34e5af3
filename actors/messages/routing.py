"""Messages between rollout actors, router and instances: the instance that generates a turn, and the versions served.

The messages of every turn are tuples, and those of one round of the event loop travel together: a turn costs little
more with the router than without.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...core.actor import endpoint
from ...core.ref import ActorRef
from ..errors import WrongPolicy
from ..names import PolicyName, Version
from .generating import InstanceApi, Loaded
from .training import Published


class RouteRequest(NamedTuple):
    """A turn that needs an instance with a version in ``oldest ... newest`` (None: no upper bound).

    ``turn``: unique in its session. ``prompt_tokens``: with the tokens generated so far; an estimate is enough.
    ``downstream_tokens``: of the turns that are expected to wait for this one, on the longest chain. ``prefix``: names
    the beginning of the prompt; the instance that had a prompt of the same name last may still know it. ``topic``:
    names the agent and the query, whose turns are expected to have similar lengths.
    """

    turn: int
    policy: PolicyName
    oldest: Version
    newest: Version | None
    prompt_tokens: int
    downstream_tokens: float
    prefix: str
    topic: str = ""


class TurnEnded(NamedTuple):
    """A turn that is no longer wanted, or no longer at an instance. ``tokens``: generated there. ``lost``: the instance
    has died, or can't be reached."""

    turn: int
    tokens: int
    lost: bool


class RouteAssigned(NamedTuple):
    """``instance``: its number in ``Routes.instances``. ``version``: the one it serves. ``version_s`` and ``queue_s``:
    seconds that the turn waited for a version, and then for room at an instance."""

    turn: int
    instance: int
    version: Version
    version_s: float
    queue_s: float


class RouteRefused(NamedTuple):
    """No instance will ever serve a version that may generate the turn. ``served``: the policy's newest version."""

    turn: int
    served: Version


@dataclass(frozen=True, slots=True)
class Routes:
    """``instances``: by number; only those that the session has not been sent yet, by the stream or in answers. An
    instance that is restarted gets another number. ``session``: of this stream, in its first item; None later."""

    routed: list[RouteAssigned] = field(default_factory=list)
    refused: list[RouteRefused] = field(default_factory=list)
    instances: dict[int, ActorRef[InstanceApi]] = field(default_factory=dict)
    session: int | None = None


class RouterApi(Protocol):
    @endpoint
    def routes(self, worker: str) -> AsyncGenerator[Routes]:
        """Opens the session of a rollout actor, by its name: routes of the turns that it asks for. The end of the
        stream is the end of the session and of all its turns."""

    async def turns(self, session: int, requests: list[RouteRequest], ended: list[TurnEnded]) -> Routes:
        """Adds turns, and ends others, routed or not. Returns the routes of those that need not wait; the others come
        by ``routes``. Without ``requests`` it may be sent one-way."""

    @endpoint(raises=[WrongPolicy])
    async def join(
        self, instance: ActorRef[InstanceApi], policies: tuple[PolicyName, ...], capacity: int
    ) -> None:
        """An instance has started, for the first time or again: it loads the newest version of each of its policies,
        and then gets turns, at most ``capacity`` at once of all together. It serves one policy, or several at the same
        time. Raises WrongPolicy if the run has no such policy."""

    async def leave(self, instance: str) -> None:
        """Returns once the instance, given by its name, has no more turns and gets none: it may be stopped."""

    async def publish(self, published: Published) -> list[Loaded]:
        """Has every instance of the policy load a version; returns once all live ones have acknowledged it, with the
        figures of each.

        Turns that wait for the version are routed from the first acknowledgement on. An instance that dies meanwhile,
        or does not acknowledge in time, is left out.
        """
