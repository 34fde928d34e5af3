"""An actor system: the actors of one process, and its calls to the actors of others.

    async with ActorSystem("host", directory) as system:
        ref = await system.add(MyActor(), "mine")
        await ref.api.greet("world")

It lives on the loop that is running and touches nothing global: no signal handler, no logging root, no
event-loop policy, no os.environ.
"""

import asyncio
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog

from . import codec
from .actor import Actor, endpoint
from .errors import (
    ActorDead,
    CallTimeout,
    FlexmarlError,
    RemoteError,
    RemoteProtocolError,
    SystemClosed,
    text_of,
)
from .messages import Envelope, Kind
from .ref import ActorRef
from .session import Session
from .telemetry import LoopLag, ProcessStatistics, process_statistics
from .wire import Link, Wire
from .wire_zmq import ZmqWire

log = structlog.get_logger()

Api = TypeVar("Api")
AnyActor = TypeVar("AnyActor", bound=Actor)

# Closing waits so long for cancelled calls, and for each actor's on_stop. Shorter than the supervisor's patience
# with a process that was asked to stop: the log says what hung before the process is killed.
_CLOSE_GRACE_S = 3.0


def ipc_address(directory: Path, name: str) -> str:
    return f"ipc://{directory / name}.sock"


class SystemActor(Actor):
    """Named ``system`` in every system: what may be asked of the process itself."""

    def __init__(self) -> None:
        self.stop_asked = asyncio.Event()
        self._lag = LoopLag()

    @endpoint
    async def stop(self) -> None:
        """Asks the process to end in good order; it replies before it does."""
        self.stop_asked.set()

    @endpoint
    async def statistics(self) -> ProcessStatistics:
        return process_statistics(self._lag)

    async def on_stop(self) -> None:
        self._lag.close()


class ActorSystem:
    def __init__(self, name: str, directory: Path) -> None:
        """``directory``: where the system's socket is made; private (0700) to the run's user."""
        self.name = name
        self._wire: Wire = ZmqWire(ipc_address(directory, name), name)
        self._session: Session[asyncio.Future[Any]] = Session()
        self._actors: dict[str, Actor] = {}
        self._serving: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._dead: dict[str, FlexmarlError] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loopback = _Loopback(self)
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        self._wire.start(self._receive)
        self.process = SystemActor()
        await self.add(self.process, "system")
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Closes everything, whatever goes wrong on the way; raises the first error, if it is not leaving with one."""
        self._closed = True
        try:
            tasks = [*self._serving.values(), *self._background]
            for task in tasks:
                task.cancel()
            await self._settled(tasks)
            first = await self._stop_actors()
        finally:
            if self._expiry is not None:
                self._expiry.cancel()
            for call in self._session.fail():
                _reject(call.token, SystemClosed(f"{self.name} closed during {call.actor}.{call.endpoint}"))
            self.failure.cancel()
            self._wire.close()
        if first is not None and error is None:
            raise first

    async def _stop_actors(self) -> BaseException | None:
        """Runs every ``on_stop``, the newest actor's first; the first error that one raised."""
        first = None
        for name, actor in reversed(self._actors.items()):
            stopping = self._loop.create_task(actor.on_stop(), name=f"{name}.on_stop")
            await self._settled([stopping])
            if not stopping.done():
                stopping.cancel()
            elif not stopping.cancelled() and (raised := stopping.exception()) is not None:
                log.error("on_stop failed", system=self.name, actor=name, error=_traceback_of(raised))
                first = first or raised
        return first

    async def _settled(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Waits for ``tasks`` to end, and names in the log those that do not."""
        late = (await asyncio.wait(tasks, timeout=_CLOSE_GRACE_S))[1] if tasks else ()
        for task in late:
            log.warning(
                "did not end in time", system=self.name, task=task.get_name(), waited_s=_CLOSE_GRACE_S
            )

    @property
    def address(self) -> str:
        return self._wire.address

    async def add(self, actor: AnyActor, name: str) -> ActorRef[AnyActor]:
        """Starts ``actor`` in this process under ``name``."""
        if name in self._actors:
            raise ValueError(f"{self.name} already has an actor named {name!r}")
        actor.system = self
        actor.ref = ref = self.ref(name, self.address, type(actor))
        await actor.on_start()
        self._actors[name] = actor
        return ref

    def ref(self, name: str, address: str, api: type[Api] | None = None) -> ActorRef[Api]:
        return ActorRef(name, address, self, api)

    def mark_dead(self, address: str, error: FlexmarlError) -> None:
        """Calls to ``address``, those in flight included, raise ``error`` from now on."""
        self._dead[address] = error
        for call in self._session.fail(address):
            _reject(call.token, error)

    def run_background(self, actor: Actor, work: Coroutine[Any, Any, None], name: str) -> None:
        """``failure`` is set to what the first such ``work`` raises: whoever runs the system waits for it.
        What fails later is logged."""
        task = self._loop.create_task(work, name=f"{type(actor).__name__}.{name}")
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._closed or self.failure.done():
            log.error("background work failed", task=task.get_name(), error=_traceback_of(error))
        else:
            self.failure.set_result(error)

    # ------------------------------------------------------------------ calling

    async def call(
        self,
        ref: ActorRef[Any],
        api: type | None,
        endpoint: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
    ) -> Any:
        """The endpoint's result; see ``ActorRef.within`` for what it raises."""
        link = self._link_to(ref)
        future: asyncio.Future[Any] = self._loop.create_future()
        call_id = self._session.open(self._loop.time(), ref.address, ref.name, endpoint, timeout_s, future)
        try:
            link.send(codec.pack([Kind.CALL, call_id, ref.name, endpoint, float(timeout_s), args, kwargs]))
            self._watch_deadlines()
            value = await future
        except asyncio.CancelledError:
            if self._session.cancel(call_id) is not None:
                link.send(codec.pack([Kind.CANCEL, call_id]))
            raise
        except FlexmarlError:
            self._session.cancel(call_id)
            raise
        signature = codec.signature_of(api, endpoint) if api is not None else None
        return value if signature is None else signature.result(value, self)

    def tell(self, ref: ActorRef[Any], endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._link_to(ref).send(codec.pack([Kind.TELL, 0, ref.name, endpoint, 0.0, args, kwargs]))

    def _link_to(self, ref: ActorRef[Any]) -> Link:
        if self._closed:
            raise SystemClosed(f"{self.name} is closed")
        if ref.address in self._dead:
            raise self._dead[ref.address]
        return self._loopback if ref.address == self.address else self._wire.connect(ref.address)

    def _watch_deadlines(self) -> None:
        due = self._session.next_deadline()
        if due is None or (self._expiry is not None and self._expiry.when() <= due):
            return
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        for call in self._session.expire(self._loop.time()):
            _reject(call.token, CallTimeout(call.actor, call.endpoint, call.timeout_s))
        self._watch_deadlines()

    # ------------------------------------------------------------------ being called

    def _receive(self, link: Link, header: bytes, body: bytes) -> None:
        try:
            envelopes = codec.unpack_message(header, body)
        except RemoteProtocolError as error:
            log.warning("message refused", system=self.name, error=str(error))
            return
        for envelope in envelopes:
            self.dispatch(link, envelope)

    def dispatch(self, link: Link, envelope: Envelope) -> None:
        kind, call_id = envelope[0], envelope[1]
        if kind == Kind.REPLY or kind == Kind.ERROR:
            call = self._session.close(call_id)
            if call is None or call.token.done():
                return
            if kind == Kind.REPLY:
                call.token.set_result(envelope[2])
            else:
                call.token.set_exception(RemoteError(call.actor, call.endpoint, *envelope[2:5]))
        elif kind == Kind.CANCEL:
            if (task := self._serving.get((id(link), call_id))) is not None:
                task.cancel()
        elif not self._closed:
            task = self._loop.create_task(self._serve(link, envelope), name=f"{envelope[2]}.{envelope[3]}")
            key = (id(link), call_id if kind == Kind.CALL else -id(task))
            self._serving[key] = task
            task.add_done_callback(lambda _: self._serving.pop(key, None))

    async def _serve(self, link: Link, envelope: Envelope) -> None:
        kind, call_id, name, endpoint_name, timeout_s, args, kwargs = envelope
        try:
            value = await self._run(name, endpoint_name, timeout_s or None, args, kwargs)
            reply = codec.pack([Kind.REPLY, call_id, value])
        except Exception as error:  # noqa: BLE001  # the caller gets it: this is the boundary between two actors
            text = _traceback_of(error)
            reply = codec.pack([Kind.ERROR, call_id, type(error).__name__, text_of(error), text])
            if kind == Kind.TELL:
                log.error("one-way message failed", actor=name, endpoint=endpoint_name, error=text)
        if kind == Kind.CALL:
            link.send(reply)

    async def _run(
        self, name: str, endpoint_name: str, timeout_s: float | None, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        actor = self._actors.get(name)
        if actor is None:
            raise ActorDead(name, f"{self.name} has no actor of that name")
        method = actor.bound_endpoint(endpoint_name)
        owner: Any = type(actor)
        signature = codec.signature_of(owner, endpoint_name)
        assert signature is not None
        arguments = signature.arguments(args, kwargs, self)
        if timeout_s is None:
            return await method(**arguments)
        async with asyncio.timeout(timeout_s):  # past it nobody waits for the result any more
            return await method(**arguments)


class _Loopback:
    """The link of a system to itself: the same encoding, no socket."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._header = codec.pack_header(system.name)

    def send(self, envelope: bytes) -> None:
        (item,) = codec.unpack_message(self._header, codec.join([envelope]))
        asyncio.get_running_loop().call_soon(self._system.dispatch, self, item)


def _traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _reject(future: asyncio.Future[Any], error: FlexmarlError) -> None:
    if not future.done():
        future.set_exception(error)
