"""Actors: classes with ``@endpoint`` methods that other actors may call."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .ref import ActorRef
from .signature import EndpointOptions, endpoint_options, mark_endpoint
from .waits import Wait

if TYPE_CHECKING:
    from .supervision.local_actors import LocalActors
    from .system import ActorSystem

Method = TypeVar("Method", bound=Callable[..., Any])


@overload
def endpoint(method: Method) -> Method: ...
@overload
def endpoint(*, raises: Sequence[type[Exception]] = ()) -> Callable[[Method], Method]: ...
def endpoint(method: Method | None = None, *, raises: Sequence[type[Exception]] = ()) -> Any:
    """Makes an async method callable by message. Messages are checked against its annotations.

        class Greeter(Actor):
            @endpoint(raises=(UnknownName,))
            async def greet(self, name: str) -> str: ...

            @endpoint
            async def count(self, up_to: int) -> AsyncIterator[int]: ...

    An async generator is a stream: its caller iterates over it, and a slow caller slows it down.

    ``raises``: error classes that callers get as such instead of RemoteError; an actor that derives from its callers'
    ``Protocol`` need not repeat them. Their constructors keep each parameter as an attribute of the same name (see
    ``declared_errors``). Raises TypeError if one does not fit.
    """

    def mark(method: Method) -> Method:
        mark_endpoint(method, EndpointOptions(tuple(raises)))
        return method

    return mark if method is None else mark(method)


@dataclass(frozen=True, slots=True)
class DeadActor:
    """The exit of an actor, for its watchers: it has ended, or its process is silent. ``stopped``: in good order."""

    actor: str
    address: str
    reason: str
    stopped: bool = False


def _check_implements(cls: type, protocol: type) -> None:
    for name, declared in vars(protocol).items():
        if name.startswith("_") or not isfunction(declared):
            continue
        method = getattr(cls, name)
        if method is declared:
            raise TypeError(f"{cls.__qualname__} does not implement {protocol.__qualname__}.{name}")
        if endpoint_options(declared) is not None and endpoint_options(method) is None:
            raise TypeError(
                f"{cls.__qualname__}.{name} must be marked as in {protocol.__qualname__}: @endpoint"
            )


class Actor:
    """Base class of all actors. Calls begin in the order of their arrival and run concurrently, as tasks of one loop:
    state that an endpoint changes across an ``await`` needs a lock or a queue of its own."""

    system: "ActorSystem"
    """The system that the actor belongs to; set before ``on_start`` runs."""
    ref: ActorRef[Any]
    """A reference to this actor, to be sent in messages."""
    _runtime: "LocalActors"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises TypeError if the class lacks a method of a ``Protocol`` among its bases, or does not mark it as the
        protocol does: calls would reach the empty body of the protocol."""
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            if getattr(base, "_is_protocol", False):
                _check_implements(cls, base)

    async def on_start(self) -> None:
        """Runs once before the first call is accepted."""

    async def on_stop(self) -> None:
        """Runs once when the actor is stopped, after the last call was cancelled. Not after a crash."""

    def statistics(self) -> Mapping[str, float]:
        """Figures of this actor by name, to be read once a step; cheap, and without side effects. They reach the
        statistics of its process."""
        return {}

    def progress(self) -> int:
        """The number of work items that this actor has ended since its start; it never falls. A program whose actors
        make no progress stands still."""
        return 0

    def waits(self) -> Sequence[Wait]:
        """Lists what this actor waits for, or computes, at present; for people who look at a program that stands still.
        May be called before ``on_start`` has ended."""
        return ()

    async def on_dead(self, dead: DeadActor) -> None:
        """Runs when an actor that this one watches has died or was stopped. If it is restarted, watch it again.

        It runs as background work: if it raises, this actor has failed.
        """

    def watch(self, ref: ActorRef[Any]) -> None:
        """Calls ``on_dead`` once, when the actor behind ``ref`` ends; at once if it has ended already.

        async def on_start(self) -> None:
            self.watch(self.store)

        async def on_dead(self, dead: DeadActor) -> None:
            log.warning("the store has ended", why=dead.reason)
        """
        self._runtime.watch(self, ref)

    def background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Runs ``work`` concurrently with the calls until the actor stops. If it raises, the actor has failed."""
        self._runtime.run_background(self, work, name)
