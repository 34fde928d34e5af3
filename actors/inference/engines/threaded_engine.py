"""Runs a ``StepEngine`` in a worker thread, so that the event loop stays free while the engine computes."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from ....core.base.texts import text_of
from ....core.errors import FlexmarlError
from ....transport.handle import StateHandle
from ....transport.state import StateTransport
from ...errors import EngineFailed, InvalidRequest, NonFiniteLogits
from ...expert_routes import Routes
from .engine import (
    TRANSFER_TIMEOUT_S,
    Engine,
    EngineRequest,
    EngineResult,
    EngineStatistics,
    LoadTimes,
    OnTokens,
    Pending,
)
from .step_engine import StepEngine

T = TypeVar("T")
Message = Callable[[], object]


class ThreadedEngine(Engine):
    """Only the worker thread builds, calls and closes the engine (but for ``statistics``); all else arrives through its
    inbox. See ``open``.

    Messages of one tick of the event loop arrive together: requests made at once join the engine's batch at once,
    instead of the first alone and the others some steps later.
    """

    # Built here and not by the caller: CUDA's current device and stream, and what libraries keep beside them, belong to
    # a thread. An engine that is built in one thread and steps in another may compute on a stream that the copies of
    # its results do not wait for.
    def __init__(self, build: Callable[[], StepEngine]) -> None:
        self._engine: StepEngine
        self._reads_in_place = False
        self._last: EngineStatistics | None = None  # of an engine that has ended
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Message] = []  # of this tick
        self._inbox: queue.SimpleQueue[list[Message] | None] = queue.SimpleQueue()
        self._turns: dict[str, Pending] = {}
        self._listeners: dict[str, OnTokens] = {}
        """Those of the turns whose tokens are wanted as they come."""
        self._token_counts: dict[str, int] = {}
        """The number of tokens that each of them has got. Of the worker thread."""
        self._is_handing_out = False
        """Tokens are on their way to the event loop: those of later steps wait, and travel together."""
        self._calls: set[asyncio.Future[Any]] = set()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        """Has a result after ``close``; raises EngineFailed if a step has failed."""
        self._problem = ""
        """The reason for which no call is served any more."""
        self._ready: asyncio.Future[None] = self._loop.create_future()
        """Has a result when the engine is built, or the error of that."""
        self._thread = threading.Thread(target=self._work, args=(build,), name="engine", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, build: Callable[[], StepEngine]) -> Self:
        """Runs the engine that ``build`` returns. Calls ``build`` in the worker thread, and raises its errors. If this
        is cancelled, the thread closes the engine once it is built, and ends."""
        threaded = cls(build)
        try:
            await threaded._ready
        except asyncio.CancelledError:
            threaded._inbox.put(None)
            raise
        return threaded

    async def generate(self, request: EngineRequest, on_tokens: OnTokens | None = None) -> EngineResult:
        self._check_open()
        name = request.request_id
        if name in self._turns:
            raise InvalidRequest(name, "the id is in use by a pending request")
        future: asyncio.Future[EngineResult] = self._loop.create_future()
        self._turns[name] = Pending(request.adapter, future)
        self._send(lambda: self._add(request))
        if on_tokens is not None:
            self._listeners[name] = on_tokens
            self._send(lambda: self._token_counts.update({name: 0}))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(lambda: self._abort(name))
            raise
        finally:
            self._turns.pop(name, None)
            if on_tokens is not None:
                self._listeners.pop(name, None)
                self._send(lambda: self._token_counts.pop(name, None))

    async def interrupt(self, adapter: str | None = None) -> None:
        for request_id, turn in self._turns.items():
            if adapter in (None, turn.adapter):
                self._send(lambda r=request_id: self._interrupt(r))  # type: ignore[misc]
        await self.run(lambda engine: None)

    async def load(self, handle: StateHandle, transport: StateTransport, adapter: str = "") -> LoadTimes:
        started = time.perf_counter()
        weights = await self.run(lambda engine: engine.room_for(handle))
        transfer_start = time.perf_counter()
        if self._reads_in_place:
            view = transport.mapped(handle, like=weights, checked=True, timeout_s=TRANSFER_TIMEOUT_S)
            async with view as tensors:
                copied = time.perf_counter()
                await self._take_over(tensors, adapter)
        else:
            await transport.get(handle, into=weights, timeout_s=TRANSFER_TIMEOUT_S)
            copied = time.perf_counter()
            await self._take_over(weights, adapter)
        return LoadTimes(copied - transfer_start, transfer_start - started + time.perf_counter() - copied)

    async def _take_over(self, tensors: Mapping[str, Any], adapter: str) -> None:
        """Waits until the engine is done with ``tensors``, also if it is cancelled: their memory is another process's,
        or about to be overwritten."""
        taking = asyncio.ensure_future(self.run(lambda engine: engine.weights_loaded(tensors, adapter)))
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait([taking])
            raise

    async def replay(self, prompt: tuple[int, ...], routes: Routes) -> EngineResult | None:
        return await self.run(lambda engine: engine.replay(prompt, routes))

    async def digests(self) -> Mapping[str, int]:
        return await self.run(lambda engine: engine.digests())

    async def run(self, function: Callable[[StepEngine], T]) -> T:
        """The result of ``function(engine)``, called in the worker thread between two steps of the engine. Raises
        EngineFailed if the engine is broken."""
        self._check_open()
        future: asyncio.Future[T] = self._loop.create_future()

        def task() -> None:
            try:
                self._post(_resolve, future, function(self._engine))
            # A call that fails is its caller's affair, but an engine that can't serve any more is everyone's: raised
            # here, this ends the thread, all calls, and by ``wait_closed`` the instance. Given to this caller alone, it
            # would leave the turns of all others to an engine that computes nothing.
            except EngineFailed:
                raise
            except Exception as error:  # noqa: BLE001  # raised by run()
                self._post(_fail, future, error)

        self._calls.add(future)
        self._send(task)
        try:
            return await future
        finally:
            self._calls.discard(future)

    def statistics(self) -> EngineStatistics:
        return self._last or self._engine.statistics()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._ended)  # a waiter that is cancelled must not end it for the others

    async def close(self) -> None:
        """Handles the messages sent so far, then ends the thread."""
        if not self._problem:
            self._flush()
            self._inbox.put(None)
            self._problem = "it was closed"
        await asyncio.to_thread(self._thread.join)
        self._release()
        if not self._ended.done():
            self._ended.set_result(None)

    def _check_open(self) -> None:
        if self._problem:
            raise EngineFailed(self._problem)

    def _send(self, message: Message) -> None:
        """Has the worker thread call ``message``."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(message)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        self._inbox.put(messages)

    # ------------------------------------------------------------------ on the worker thread

    def _work(self, build: Callable[[], StepEngine]) -> None:
        try:
            self._engine = build()
            self._reads_in_place = self._engine.reads_in_place
        except BaseException as error:  # noqa: BLE001  # raised by open()
            self._post(_fail, self._ready, error)
            return
        try:
            try:
                self._post(_resolve, self._ready, None)
                while self._take_messages():
                    results = self._step()
                    if self._token_counts:
                        self._hand_out()
                    if results:
                        self._post(self._deliver, results)
            finally:
                self._engine.close()
        except BaseException as error:  # noqa: BLE001  # a broken engine ends its instance, through `wait_closed`
            self._post(self._break, error)

    def _step(self) -> list[EngineResult]:
        """A step of the engine. Requests whose logits are not finite fail, and one that can't be continued; the others
        continue."""
        try:
            return self._engine.step()
        except NonFiniteLogits as error:
            for request_id in error.request_ids:
                self._engine.abort(request_id)
                self._post(self._refuse, request_id, NonFiniteLogits((request_id,)))
            return []
        except InvalidRequest as error:
            self._engine.abort(error.request_id)
            self._post(self._refuse, error.request_id, error)
            return []

    def _hand_out(self) -> None:
        """Sends new tokens to their listeners. Never waits for them."""
        if self._is_handing_out:
            return
        if tokens_by_request := self._engine.new_tokens(self._token_counts):
            for name, tokens in tokens_by_request.items():
                self._token_counts[name] += len(tokens)
            self._is_handing_out = True
            self._post(self._pass_on, tokens_by_request)

    def _take_messages(self) -> bool:
        """Handles the inbox; waits for a message if the engine has no request. False: the thread is to end."""
        while True:
            try:
                messages = self._inbox.get(block=not self._engine.pending)
            except queue.Empty:
                return True
            if messages is None:
                return False
            for message in messages:
                message()

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except FlexmarlError as error:
            self._post(self._refuse, request.request_id, error)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def _interrupt(self, request_id: str) -> None:
        if (
            result := self._engine.abort(request_id)
        ) is not None:  # None: it has finished, its result is posted
            self._post(self._deliver, [result])

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Has the event loop call ``function``."""
        self._loop.call_soon_threadsafe(function, *args)

    # ------------------------------------------------------------------ on the event loop

    def _pass_on(self, tokens_by_request: dict[str, tuple[int, ...]]) -> None:
        self._is_handing_out = False
        for name, tokens in tokens_by_request.items():
            if (listener := self._listeners.get(name)) is not None and listener(tokens) is True:
                del self._listeners[name]
                self._send(lambda n=name: self._interrupt(n))  # type: ignore[misc]

    def _deliver(self, results: list[EngineResult]) -> None:
        for result in results:
            if (turn := self._turns.get(result.request_id)) is not None:
                _resolve(turn.result, result)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if (turn := self._turns.get(request_id)) is not None:
            _fail(turn.result, error)

    def _break(self, error: BaseException) -> None:
        """The thread has ended with ``error``."""
        named = (
            error.problem if isinstance(error, EngineFailed) else f"{type(error).__name__}: {text_of(error)}"
        )
        self._problem = self._problem or named
        self._release()
        failed = EngineFailed(self._problem)
        failed.__cause__ = error
        _fail(self._ended, failed)
        self._ended.exception()  # it may have no waiter

    def _release(self) -> None:
        """Ends the calls that are left, and frees the engine."""
        for future in (*(turn.result for turn in self._turns.values()), *self._calls):
            _fail(future, EngineFailed(self._problem))
        if self._last is None:
            self._last = self._engine.statistics()
            del self._engine


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
