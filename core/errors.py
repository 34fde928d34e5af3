"""The errors that the runtime raises on purpose.

A message says what happened, where, and what to do next; the numbers in it are attributes too.
"""

from pathlib import Path
from typing import Any, NamedTuple

from .base.texts import listing, text_of, traceback_of


class FlexmarlError(Exception):
    """Base of all errors below."""


class Origin(NamedTuple):
    """The actor that raised an error first, the name of its class, and its text."""

    actor: str
    kind: str
    text: str


def origin_of(error: BaseException, actor: str) -> Origin:
    """The origin of an error that was raised in ``actor``: there, or in the actor that answered a call with it."""
    if isinstance(error, RemoteError):
        return Origin(error.actor, error.kind, error.message)
    kind, answer = type(error).__name__, error.__cause__
    if isinstance(answer, RemoteError) and answer.declared == kind:
        actor = answer.actor
    return Origin(actor, kind, text_of(error))


# --------------------------------------------------------------------------- the runtime


class CallTimeout(FlexmarlError):
    """No reply within the deadline. The callee may or may not have acted."""

    def __init__(
        self, actor: str, endpoint: str, timeout_s: float, phase: str = "waiting for the reply"
    ) -> None:
        super().__init__(f"{actor}.{endpoint}: no answer within {timeout_s:g} s ({phase})")
        self.actor = actor
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.phase = phase


class ActorDead(FlexmarlError):
    """The process of an actor ended while it was needed."""

    def __init__(self, actor: str, reason: str, *, stopped: bool = False, reported: bool = False) -> None:
        """``stopped``: in good order. ``reported``: the actor's own system has answered that the actor has ended; its
        supervisor gets the exact error from there, perhaps a little later."""
        super().__init__(f"actor {actor} died: {reason}")
        self.actor = actor
        self.reason = reason
        self.stopped = stopped
        self.reported = reported


class Unreachable(ActorDead):
    """There is no connection to the actor's process: no process listens there, or it refuses this one."""

    def __init__(self, actor: str, reason: str) -> None:
        super().__init__(actor, reason)
        self.args = (f"actor {actor} can't be reached: {reason}",)


class TooManyRestarts(ActorDead):
    """An actor failed after all the restarts that its supervisor allows; ``__cause__`` is its last failure."""

    def __init__(self, actor: str, restarts: int, period_s: float, cause: BaseException) -> None:
        super().__init__(
            actor,
            f"its supervisor has restarted {restarts} times within {period_s:g} s, and then: {text_of(cause)}",
        )
        self.restarts = restarts
        self.period_s = period_s
        self.__cause__ = cause


class ActorNotFound(FlexmarlError):
    """There is no actor of that name."""

    def __init__(self, actor: str, system: str) -> None:
        super().__init__(
            f"{system} knows no actor {actor!r}: neither its own, nor of its processes, nor of a system that it is "
            "connected to"
        )
        self.actor = actor


class ActorFailed(FlexmarlError):
    """An actor could not be started, or raised outside any call. ``remote_traceback`` is its own.

    ``kind``: the class name of the error that was raised first. ``raised_in``: the actor that raised it; another one
    if the error is the answer to a call.
    """

    def __init__(
        self, actor: str, error: str, remote_traceback: str, *, kind: str = "", raised_in: str = ""
    ) -> None:
        super().__init__(f"actor {raised_in or actor} failed: {f'{kind}: ' if kind else ''}{error}")
        self.actor = actor
        self.error = error
        self.remote_traceback = remote_traceback
        self.kind = kind
        self.raised_in = raised_in


def failure_of(actor: str, error: BaseException) -> ActorFailed:
    """The failure of ``actor``, in which ``error`` was raised."""
    raised_in, kind, text = origin_of(error, actor)
    return ActorFailed(actor, text, traceback_of(error), kind=kind, raised_in=raised_in)


class RemoteError(FlexmarlError):
    """The endpoint raised. ``kind`` is the exception's class name, ``remote_traceback`` its text.

    If the endpoint declares that class or one of its bases, ``declared`` is that name and ``fields`` are its plain
    fields. A caller that declares it too gets that class instead, with the RemoteError as its ``__cause__``.
    """

    def __init__(
        self,
        actor: str,
        endpoint: str,
        kind: str,
        message: str,
        remote_traceback: str,
        declared: str = "",
        fields: dict[Any, Any] | None = None,
    ) -> None:
        super().__init__(f"{actor}.{endpoint} raised {kind}: {message}")
        self.actor = actor
        self.endpoint = endpoint
        self.kind = kind
        self.message = message
        self.remote_traceback = remote_traceback
        self.declared = declared
        self.fields = {} if fields is None else fields
        self.add_note(f"Remote traceback of {actor}.{endpoint}:\n{remote_traceback}")


def is_loss(error: BaseException) -> bool:
    """True if an actor was lost, or ``error`` follows from that: its process ended, it is silent, or a handler or an
    actor failed with such an error. So is a caller whose calls the callee has cancelled: it was given up for its
    silence. The same work may succeed once the actor has been started again."""
    match error:
        case ActorDead() | CallTimeout():
            return True
        case ActorFailed() | RemoteError():
            return error.kind in _LOSSES
        case BaseExceptionGroup():
            return any(map(is_loss, error.exceptions))
    return False


CANCELLED = "cancelled"
"""``kind`` of the RemoteError of a call that the callee has cancelled, and not its caller."""

_LOSSES = frozenset(kind.__name__ for kind in (ActorDead, Unreachable, TooManyRestarts, CallTimeout)) | {
    CANCELLED
}
"""``kind`` of the error of a handler or an actor that lost another actor."""


class RemoteProtocolError(FlexmarlError):
    """The peer sent a message that does not fit the endpoint's signature or the wire format."""


class LocalProtocolError(FlexmarlError):
    """This side tried to send something that can't be a message."""


class CallNotAllowed(FlexmarlError):
    """The callee's system admits this client, and its allow-list does not permit it to make this call."""

    def __init__(self, actor: str, endpoint: str) -> None:
        super().__init__(
            f'{actor}.{endpoint}: this client may not call it; if it should, add the rule "{actor}:{endpoint}" '
            "there: ActorSystem.allow(public_key, calls=[...])"
        )
        self.actor = actor
        self.endpoint = endpoint


class NoCredit(FlexmarlError):
    """A message could not be sent without waiting: a whole window of requests to its actor is not answered yet."""

    def __init__(self, actor: str, endpoint: str, requests: int, size_bytes: int) -> None:
        super().__init__(f"{actor}.{endpoint}: {requests} requests of {size_bytes} bytes are under way to it")
        self.actor = actor
        self.endpoint = endpoint
        self.requests = requests
        self.size_bytes = size_bytes


class SystemClosed(FlexmarlError):
    """The actor system was closed while the call was under way."""


class InvalidKeys(FlexmarlError):
    """CURVE keys that are malformed or don't fit their use. The message never holds a key."""


class UnsafeKeys(FlexmarlError):
    """A file of keys can't be trusted: other users may have read or written it, or its content is invalid."""

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(f"the keys in {path} are refused: {problem}; {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy


class UnsafeDirectory(FlexmarlError):
    """A folder for sockets, keys or shared memory can't be trusted: other users may have access to it, or it does not
    exist."""

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(f"the folder {path} is refused: {problem}; {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy


class PlainTcpRefused(FlexmarlError):
    """TCP without keys would leave this machine."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"plain TCP is refused with host {host!r}, which is not loopback: anyone who reaches it could command "
            "every actor, and read every message; give the system keys (Keys.make()), use 127.0.0.1, or, on a network "
            "without other users, set plain_beyond_loopback=True"
        )
        self.host = host


class Deadlock(FlexmarlError):
    """In virtual time: nothing is ready and no timer is set, so the program can never continue.

    ``waiting`` has one text per task: its name and where it waits.
    """

    def __init__(self, time_s: float, waiting: list[str]) -> None:
        super().__init__(
            f"deadlock at {time_s:g} s of virtual time: nothing is ready and no timer is set; "
            f"waiting tasks: {len(waiting)}{listing(waiting)}"
        )
        self.time_s = time_s
        self.waiting = waiting


class VirtualTimeExceeded(FlexmarlError):
    """The next timer of a program in virtual time is due after its limit: in most cases an endless loop.

    ``waiting`` has one text per task: its name and where it waits.
    """

    def __init__(self, limit_s: float, next_s: float, waiting: list[str]) -> None:
        super().__init__(
            f"the next timer is due at {next_s:g} s of virtual time, after the limit of {limit_s:g} s; "
            f"waiting tasks: {len(waiting)}{listing(waiting)}"
        )
        self.limit_s = limit_s
        self.next_s = next_s
        self.waiting = waiting


class NotInVirtualTime(FlexmarlError):
    """An operation of a loop in virtual time would wait for the real world."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"{operation} waits for the real world, which virtual time can't do deterministically: "
            "put something simulated in its place, or run under asyncio.run"
        )
        self.operation = operation


class JournalError(FlexmarlError):
    """A file of records can't be used as the journal that it should be."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"journal {path}: {problem}")
        self.path = path
        self.problem = problem
