"""What an actor is: a class whose ``@endpoint`` methods other actors may call."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import RemoteProtocolError
from .ref import ActorRef

if TYPE_CHECKING:
    from .system import ActorSystem

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])

_MARK = "__flexmarl_endpoint__"


def endpoint(method: Method) -> Method:
    """Makes an async method callable by message. Its annotations are what messages are checked against."""
    setattr(method, _MARK, True)
    return method


class Actor:
    """Base of all actors. Calls run as tasks of the system's loop, several at a time: state that an
    endpoint changes across an ``await`` needs a lock or a queue of its own."""

    system: "ActorSystem"
    ref: ActorRef[Any]

    async def on_start(self) -> None:
        """Runs once before the first call is accepted."""

    async def on_stop(self) -> None:
        """Runs once when the system closes, after the last call was cancelled."""

    def background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Runs ``work`` beside the calls until the actor stops. If it raises, the actor has failed."""
        self.system.run_background(self, work, name)

    def bound_endpoint(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Raises RemoteProtocolError where the actor has no such endpoint."""
        method = getattr(type(self), name, None)
        if not getattr(method, _MARK, False):
            raise RemoteProtocolError(f"{type(self).__name__} has no endpoint {name!r}")
        bound: Callable[..., Awaitable[Any]] = getattr(self, name)
        return bound
