"""Nodes: a host, or a host's share, on which supervised actors run."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import ActorDead, FlexmarlError
from ..ref import ActorRef
from ..telemetry import LogLevel, get_logger
from .system_api import SystemApi

log = get_logger(__name__)

NODE_DIRECTORY = "{the node's directory}"
"""As the value of a variable in ``Launch.env``: the directory of the node's systems."""

# A large model may be loaded first. A process that ends before it is ready is noticed at once.
START_TIMEOUT_S = 3600.0
# Longer than a system takes to close (``CLOSE_GRACE_S``), so that its log names what hung before it is terminated.
_STOP_GRACE_S = 5.0
_TERM_GRACE_S = 2.0
# A process in an uninterruptible system call (a dead NFS server, a driver) outlives SIGKILL: no wait is longer.
_KILL_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Launch:
    """One incarnation of an actor that is started; plain data. ``actor_class``: its import path. ``args``, ``kwargs``:
    for its constructor. ``env``: see ``Supervisor.spawn``. ``supervisor``: the name of the actor that it reports to,
    and the address of its system. ``epoch``: of the incarnation, one more than the last one's. ``log_level``: the least
    one of its log's lines."""

    name: str
    actor_class: str
    args: list[Any]
    kwargs: dict[str, Any]
    supervisor: tuple[str, str]
    epoch: int
    log_level: LogLevel = "info"
    env: dict[str, str] = field(default_factory=dict)


class Running(ABC):
    """One incarnation of an actor on a node, from its start to its end.

    ``label``: for people. ``started``: set by its supervisor, when ``on_start`` has ended. ``exit_reason``: set when it
    has ended, or has reported a failure. ``stop_requested``: its exit is not a failure. ``exit_handled``: its
    supervisor has handled its exit. ``was_late``: it did not end in good order when it was asked to.
    """

    def __init__(self, name: str, epoch: int, label: str) -> None:
        self.name = name
        self.epoch = epoch
        self.label = label
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.exit_reason: FlexmarlError | None = None
        self.stop_requested = False
        self.exit_handled = False
        self.was_late = False

    @abstractmethod
    def has_exited(self) -> bool:
        """True if it has ended or is ending, also if the loop does not know yet."""

    def description(self) -> str:
        """``label``, and whether the process is stopped, if that can be known."""
        return self.label

    @abstractmethod
    async def wait_exit(self) -> str:
        """Waits for the end; returns its manner, for example ``exit status 1``. To be awaited once."""

    @abstractmethod
    def terminate(self) -> None:
        """Asks it to end, as SIGTERM does."""

    @abstractmethod
    def end(self) -> None:
        """Ends it at once, as SIGKILL does."""

    def log_tail(self) -> str:
        """The end of its log, as a paragraph that begins a new line; empty without one."""
        return ""

    async def wait_ended(self) -> FlexmarlError:
        """Waits for the end; returns the reason. To be awaited once, by its supervisor."""
        how = await self.wait_exit()
        if self.exit_reason is None:
            last = "" if self.stop_requested else self.log_tail()
            self.exit_reason = ActorDead(self.name, f"{self.label} {how}{last}")
        self.ended.set()
        return self.exit_reason

    async def wait_ready(self) -> None:
        """Waits for the end of ``on_start``.

        Raises ActorFailed if the constructor or ``on_start`` raised, ActorDead if it ended otherwise or is not ready
        within START_TIMEOUT_S. It is killed if it is late, or if this wait is cancelled.
        """
        # ``started`` may never come: a process that dies in its imports reports nothing, and its end is all there is.
        ended = asyncio.ensure_future(self.ended.wait())
        started = asyncio.ensure_future(self.started.wait())
        try:
            await asyncio.wait([started, ended], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            started.cancel()
            ended.cancel()
        if self.ended.is_set():
            assert self.exit_reason is not None
            raise self.exit_reason
        if not self.started.is_set():
            late = f"not ready within {START_TIMEOUT_S:g} s{self.log_tail()}"
            self.exit_reason = ActorDead(self.name, late)
            self.kill()
            await self.wait_gone()
            raise self.exit_reason

    async def stop(self, system_actor: ActorRef[SystemApi]) -> None:
        """Asks it to end, by its ``system_actor``; after a grace period terminates it, then kills it."""
        # By a message first: the process of an actor has no handler for SIGTERM, which ends it without ``on_stop``.
        self.stop_requested = True
        if self.started.is_set() and not self.ended.is_set():
            try:
                if self.exit_reason is None:  # else it is ending already
                    await _ask_to_stop(system_actor)
                await asyncio.wait_for(self.ended.wait(), _STOP_GRACE_S)
            except (FlexmarlError, TimeoutError) as error:
                log.warning("actor did not stop when asked", name=self.name, error=str(error))
        if not self.ended.is_set():
            self.was_late = self.started.is_set()
            self.terminate()
            try:
                await asyncio.wait_for(self.ended.wait(), _TERM_GRACE_S)
            except TimeoutError:
                log.warning("actor ignored SIGTERM", name=self.name)
                self.kill()
        await self.wait_gone()

    def kill(self) -> None:
        """Ends it at once; its exit is not a failure."""
        self.stop_requested = True
        self.end()

    async def wait_gone(self) -> None:
        """Waits for one that is ending or was killed, at most 5 s; logs an error if it does not end."""
        try:
            await asyncio.wait_for(self.ended.wait(), _KILL_GRACE_S)
        except TimeoutError:
            log.error("process does not end", name=self.name, process=self.label, waited_s=_KILL_GRACE_S)


async def _ask_to_stop(system_actor: ActorRef[SystemApi]) -> None:
    try:
        await system_actor.within(_STOP_GRACE_S).stop()
    except ActorDead:  # it ended before its reply left
        return


class Node(Protocol):
    """``name``: of the node. A node may belong to several supervisors."""

    name: str

    def check(self, launch: Launch) -> None:
        """Raises LocalProtocolError or ValueError for a ``launch`` that this node can't start."""
        ...

    @property
    def starter(self) -> str:
        """The part of the node that starts processes, for people."""
        return f"node {self.name}"

    @property
    def lost(self) -> ActorDead | None:
        """The reason why nothing can be started on this node any more; all its actors have ended, as far as others
        know."""
        return None

    @property
    def address(self) -> str:
        """The address of the process that starts actors on another host; empty if that is this host."""
        return ""

    async def reserve(self, actor: str) -> str:
        """The address at which the actor will listen, in all of its incarnations. Repeated, the same address. Raises
        OSError."""
        ...

    async def launch(self, launch: Launch) -> Running:
        """Starts an incarnation; its predecessor has ended. Raises OSError."""
        ...

    def release(self, actor: str) -> None:
        """Frees the address of an actor whose last incarnation has ended, or that was never started. Can be
        repeated."""
        ...

    def close(self) -> None:
        """Frees all addresses that are reserved."""
        ...
