"""What an actor is: a class whose ``@endpoint`` methods other actors may call."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .ref import ActorRef
from .signature import EndpointOptions, mark_endpoint

if TYPE_CHECKING:
    from .system import ActorSystem

Method = TypeVar("Method", bound=Callable[..., Any])


@overload
def endpoint(method: Method) -> Method: ...
@overload
def endpoint(*, idempotent: bool = False) -> Callable[[Method], Method]: ...
def endpoint(method: Method | None = None, *, idempotent: bool = False) -> Any:
    """Makes an async method callable by message. Its annotations are what messages are checked against.

    An async generator is a stream: its caller iterates over it, and slows it when slower. ``idempotent``: a call may be
    sent again after a loss or a restart of the actor; one that was answered before gets the same answer, the method
    does not run again. Give the callers' ``Protocol`` the same mark: the caller decides whether it may repeat.
    """

    def mark(method: Method) -> Method:
        mark_endpoint(method, EndpointOptions(idempotent))
        return method

    return mark if method is None else mark(method)


@dataclass(frozen=True, slots=True)
class DeadActor:
    """Arrives at whoever watches an actor: it ended, or nothing is heard of it any more. ``stopped``: in good order."""

    actor: str
    address: str
    reason: str
    stopped: bool = False


class Actor:
    """Base of all actors. Calls begin in the order in which they arrive and run side by side, as tasks of the system's
    loop: state that an endpoint changes across an ``await`` needs a lock or a queue of its own."""

    system: "ActorSystem"
    ref: ActorRef[Any]

    async def on_start(self) -> None:
        """Runs once before the first call is accepted."""

    async def on_stop(self) -> None:
        """Runs once when the actor is stopped, after the last call was cancelled. Not after a crash."""

    async def on_dead(self, dead: DeadActor) -> None:
        """An actor that this one watches has died, or was stopped. Where it is restarted it must be watched anew.

        Runs as background work: if it raises, this actor has failed.
        """

    def watch(self, ref: ActorRef[Any]) -> None:
        """Has ``on_dead`` called once, when the actor behind ``ref`` ends. At once where it has ended already."""
        self.system.fates.watch(self, ref)

    def link(self, ref: ActorRef[Any]) -> None:
        """Binds two fates: when either actor dies, the other fails with ActorDead. At once where ``ref`` is dead.

        As in OTP an actor that is stopped in good order takes nobody with it. One whose process was killed does.
        """
        self.system.fates.link(self, ref)

    def background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Runs ``work`` beside the calls until the actor stops. If it raises, the actor has failed."""
        self.system.run_background(self, work, name)
