"""Every error flexmarl raises on purpose, split by whose fault it is.

A message says what happened, where, and what to do next; the numbers in it are attributes too.
"""

import traceback
from pathlib import Path


class FlexmarlError(Exception):
    """Base of all errors below."""


def text_of(error: BaseException) -> str:
    """``str(error)``, also where the error is of a class whose ``__str__`` raises."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  # the class is a user's, and the first error matters more
        return f"(its text can't be had: {type(broken).__name__})"


def listing(lines: list[str], at_most: int = 20) -> str:
    """``lines`` to end a message with, one under the other; those past ``at_most`` are only counted."""
    more = [f"and {len(lines) - at_most} more"] if len(lines) > at_most else []
    return "".join(f"\n  {line}" for line in lines[:at_most] + more)


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


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

    def __init__(self, actor: str, reason: str, *, stopped: bool = False) -> None:
        """``stopped``: in good order."""
        super().__init__(f"actor {actor} died: {reason}")
        self.actor = actor
        self.reason = reason
        self.stopped = stopped


class Unreachable(ActorDead):
    """No connection to the actor's process came about: nobody listens there, or it does not let this side in."""

    def __init__(self, actor: str, reason: str) -> None:
        super().__init__(actor, reason)
        self.args = (f"actor {actor} can't be reached: {reason}",)


class TooManyRestarts(ActorDead):
    """An actor died once more after all the restarts that its supervisor allows; ``__cause__`` is its last death."""

    def __init__(self, actor: str, restarts: int, period_s: float, cause: BaseException) -> None:
        super().__init__(
            actor,
            f"its supervisor has restarted {restarts} times within {period_s:g} s, and then: {text_of(cause)}",
        )
        self.restarts = restarts
        self.period_s = period_s
        self.__cause__ = cause


class ActorNotFound(FlexmarlError):
    """No actor of that name is known."""

    def __init__(self, actor: str, system: str) -> None:
        super().__init__(
            f"{system} knows no actor {actor!r}: neither its own, nor of its processes, nor of a system that it is "
            "connected to"
        )
        self.actor = actor


class ActorFailed(FlexmarlError):
    """An actor could not be started, or raised outside any call. ``remote_traceback`` is its own."""

    def __init__(self, actor: str, error: str, remote_traceback: str) -> None:
        super().__init__(f"actor {actor} failed: {error}")
        self.actor = actor
        self.remote_traceback = remote_traceback


class RemoteError(FlexmarlError):
    """The endpoint raised. ``kind`` is the exception's class name, ``remote_traceback`` its text."""

    def __init__(self, actor: str, endpoint: str, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(f"{actor}.{endpoint} raised {kind}: {message}")
        self.actor = actor
        self.endpoint = endpoint
        self.kind = kind
        self.message = message
        self.remote_traceback = remote_traceback
        self.add_note(f"Remote traceback of {actor}.{endpoint}:\n{remote_traceback}")


class RemoteProtocolError(FlexmarlError):
    """The peer sent a message that does not fit the endpoint's signature or the wire format."""


class LocalProtocolError(FlexmarlError):
    """This side tried to send something that can't be a message."""


class NoCredit(FlexmarlError):
    """A message could not be sent without waiting: its actor has a whole window of requests to work off first."""

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
    """A file of keys can't be trusted: others may know or have written it, or it is no such file."""

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(f"the keys in {path} are refused: {problem}; {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy


class PlainTcpRefused(FlexmarlError):
    """TCP without keys would leave this machine."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"plain TCP is refused with host {host!r}, which is not loopback: whoever reaches it could command every "
            "actor, and read every message; give the system keys (Keys.make()), use 127.0.0.1, or, on a network "
            "closed to all others, say plain_beyond_loopback=True"
        )
        self.host = host


class Deadlock(FlexmarlError):
    """In virtual time: nothing is ready and no timer is set, so the program can never go on.

    ``waiting`` has one text per task: its name and where it waits.
    """

    def __init__(self, time_s: float, waiting: list[str]) -> None:
        super().__init__(
            f"deadlock at {time_s:g} s of virtual time: nothing is ready and no timer is set; "
            f"tasks that wait: {len(waiting)}{listing(waiting)}"
        )
        self.time_s = time_s
        self.waiting = waiting


class VirtualTimeExceeded(FlexmarlError):
    """The next timer of a program in virtual time is due after its limit: a loop without an end, mostly.

    ``waiting`` has one text per task: its name and where it waits.
    """

    def __init__(self, limit_s: float, next_s: float, waiting: list[str]) -> None:
        super().__init__(
            f"the next timer is due at {next_s:g} s of virtual time, after the limit of {limit_s:g} s; "
            f"tasks that wait: {len(waiting)}{listing(waiting)}"
        )
        self.limit_s = limit_s
        self.next_s = next_s
        self.waiting = waiting


class NotInVirtualTime(FlexmarlError):
    """An operation that waits for the real world was asked of a loop in virtual time."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"{operation} waits for the real world, which virtual time can't do deterministically: "
            "put something simulated in its place, or run under asyncio.run"
        )
        self.operation = operation


class JournalError(FlexmarlError):
    """A journal of answers can't be used."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"journal {path}: {problem}")
        self.path = path
        self.problem = problem


# --------------------------------------------------------------------------- the user's recipe and config


class ConfigError(FlexmarlError):
    """The configuration is refused; the message names the key, the value and what is allowed."""


class RunDirectoryError(FlexmarlError):
    """The run directory can't be used as asked."""


class RecipeError(FlexmarlError):
    """The recipe and the config don't fit each other: no trajectory of the run can succeed."""


class InvalidReward(FlexmarlError):
    """A workflow returned a reward that is not a finite number."""


class InvalidColumn(FlexmarlError):
    """A workflow wrote what a column of a turn's sample does not take, wrote it twice, or left out a required one."""


class TooManyFailures(FlexmarlError):
    """More trajectories of a step failed than the config allows."""


class ProtocolViolation(FlexmarlError):
    """An event that can't happen in the state the pipeline is in: a defect, never a user's mistake."""


class Interrupted(FlexmarlError):
    """A signal ended the run before its actors could."""


# --------------------------------------------------------------------------- training


class StoreError(FlexmarlError):
    """A write or a lease that a table refuses; the table is unchanged."""


class StoreFull(StoreError):
    """There is no room for what was to be written: nothing of it was accepted, and nothing else is lost. Once rows
    were consumed, or their disk has room again, the same may succeed."""

    def __init__(
        self, where: Path, needed_bytes: int, problem: str, *, by_its_own_limits: bool = False
    ) -> None:
        """``by_its_own_limits``: the disk has room, the store may not take it."""
        super().__init__(f"no room for {needed_bytes} bytes in {where}: {problem}")
        self.by_its_own_limits = by_its_own_limits
        self.where = where
        self.needed_bytes = needed_bytes
        self.problem = problem


class StaleSample(FlexmarlError):
    """A sample reached the trainer of a policy whose version did not generate it."""

    def __init__(self, sample_id: str, sample_version: int, policy: str, policy_version: int) -> None:
        super().__init__(
            f"sample {sample_id} was generated by version {sample_version} of policy {policy}, "
            f"which is at version {policy_version}: it can't be trained on strictly on-policy"
        )
        self.sample_id = sample_id
        self.sample_version = sample_version
        self.policy = policy
        self.policy_version = policy_version


class NonFiniteGradient(FlexmarlError):
    """The gradient of an optimizer step is infinite or not a number. The weights were not touched."""

    def __init__(self, policy: str, policy_version: int, grad_norm: float) -> None:
        super().__init__(
            f"policy {policy}, step from version {policy_version}: the gradient norm is {grad_norm}; "
            "the weights are unchanged, go on from the last checkpoint"
        )
        self.policy = policy
        self.policy_version = policy_version
        self.grad_norm = grad_norm


class CheckpointIncomplete(FlexmarlError):
    """A file of a checkpoint is missing or cut short."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"checkpoint file {path}: {problem}")
        self.path = path
        self.problem = problem


class CheckpointMismatch(FlexmarlError):
    """A checkpoint is whole but belongs to something else: a tensor, name or number differs."""

    def __init__(self, path: Path, name: str, expected: str, found: str) -> None:
        super().__init__(f"checkpoint file {path}: {name}: expected {expected}, found {found}")
        self.path = path
        self.name = name
        self.expected = expected
        self.found = found


# --------------------------------------------------------------------------- generating


class WrongVersion(FlexmarlError):
    """A turn asked for another policy version than its agent's instances serve."""

    def __init__(self, agent: str, asked: int, served: int | None) -> None:
        super().__init__(f"a turn asks for version {asked} of {agent}, version {served} is served")
        self.agent = agent
        self.asked = asked
        self.served = served


class TurnAborted(FlexmarlError):
    """The engine dropped the turn because new weights came in."""


class PromptTooLong(FlexmarlError):
    """A request's prompt and the tokens it may generate exceed the engine's context."""

    def __init__(self, request_id: str, prompt_tokens: int, max_new_tokens: int, max_context: int) -> None:
        super().__init__(
            f"request {request_id}: {prompt_tokens} prompt tokens + {max_new_tokens} new ones exceed the "
            f"engine's context of {max_context}: shorten the prompt or raise max_context"
        )
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.max_context = max_context


class InvalidRequest(FlexmarlError):
    """A request no engine can serve: no prompt, a token outside the vocabulary, an id already in use."""

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"request {request_id}: {problem}")
        self.request_id = request_id
        self.problem = problem


class RequestsInFlight(FlexmarlError):
    """The engine's weights were replaced while it still had requests: they would mix two versions."""

    def __init__(self, pending: int) -> None:
        super().__init__(f"weights were replaced with {pending} requests in flight: drain or abort first")
        self.pending = pending


class UnsupportedModel(FlexmarlError):
    """The embedded engine can't run this architecture; another engine may."""

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"{model}: {problem}")
        self.model = model
        self.problem = problem


class NonFiniteLogits(FlexmarlError):
    """The model's output is infinite or not a number: its weights are broken, or were never loaded."""

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        super().__init__(
            f"the logits of {len(request_ids)} requests ({', '.join(request_ids[:4])} ...) are not finite: "
            "look at the weights that were loaded last"
        )
        self.request_ids = request_ids


# --------------------------------------------------------------------------- the transport


class TransportError(FlexmarlError):
    """Base of what Set and Get raise."""


class TransportClosed(TransportError):
    """The transport is not open (any more): a transfer was begun or under way."""

    def __init__(self) -> None:
        super().__init__("the state transport is closed: use it inside its `async with`")


class NoPath(TransportError):
    """No transfer path reaches the destination."""

    def __init__(self, source: str, destination: str, what: str) -> None:
        super().__init__(f"no transfer path from {source} to {destination} ({what})")
        self.source = source
        self.destination = destination


class StaleHandle(TransportError):
    """The handle's version was overwritten by the second newer one, or its owner has left (``found`` is None)."""

    def __init__(self, key: str, asked: int, found: int | None) -> None:
        there = "nothing: its owner has left" if found is None else f"version {found}"
        super().__init__(f"state {key}: version {asked} was asked for, found {there}; ask for a newer handle")
        self.key = key
        self.asked = asked
        self.found = found


class CorruptState(TransportError):
    """The bytes of a state are not those that were set: their digests differ."""

    def __init__(self, key: str, version: int, expected: int | None, found: int) -> None:
        super().__init__(f"state {key}, version {version}: digest {found:#x} instead of {expected or 0:#x}")
        self.key = key
        self.version = version
        self.expected = expected
        self.found = found


class StateMismatch(TransportError):
    """The tensors to write into are not those of the state. Nothing was written."""

    def __init__(self, key: str, problems: list[str]) -> None:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        super().__init__(f"state {key} does not fit its destination: {'; '.join(problems[:10])}{more}")
        self.key = key
        self.problems = problems


class ForeignHandle(TransportError):
    """A handle points to something that is not a state of this run."""

    def __init__(self, location: str, directory: str, reason: str) -> None:
        super().__init__(f"handle location {location!r} is refused in {directory}: {reason}")
        self.location = location
        self.directory = directory


class UnsafeDirectory(TransportError):
    """The directory for states is missing or open to other users."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(f"states can't be kept in {directory}: {reason}")
        self.directory = directory


class ArenaSpace(TransportError):
    """A state's arena does not fit into the file system of its directory."""

    def __init__(self, needed_bytes: int, free_bytes: int, directory: str) -> None:
        super().__init__(
            f"an arena of {needed_bytes} bytes does not fit into {directory}: {free_bytes} bytes are free; "
            "make the file system larger or choose another directory"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.directory = directory


class SegmentFull(TransportError):
    """No segment that this writer was granted has room for a batch: another is needed. Nothing was written."""

    def __init__(self, needed_bytes: int, left_bytes: int) -> None:
        super().__init__(
            f"a batch of {needed_bytes} bytes does not fit into the {left_bytes} that are left of the segment"
        )
        self.needed_bytes = needed_bytes
        self.left_bytes = left_bytes


class TransferTimeout(TransportError):
    """A transfer took longer than its deadline."""

    def __init__(
        self, operation: str, key: str, version: int, path: str, size_bytes: int, timeout_s: float
    ) -> None:
        super().__init__(
            f"{operation} of state {key}, version {version}: {size_bytes} bytes by path {path} "
            f"took longer than {timeout_s:g} s"
        )
        self.operation = operation
        self.key = key
        self.version = version
        self.timeout_s = timeout_s


class BenchmarkFailed(FlexmarlError):
    """A measurement went wrong, so that there is no figure to show."""
