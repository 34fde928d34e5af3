"""Drives an engine from one worker thread, so that the event loop stays free while it computes."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ...core.errors import FlexmarlError
from ..errors import InvalidRequest
from .engines.engine import Engine, EngineRequest, EngineResult

T = TypeVar("T")
Message = Callable[[], None]


class EngineThread:
    """The engine is touched by the worker thread alone; everything else reaches it through the inbox.

    What is asked within one tick of the event loop gets there together: requests that arrive at once join the
    engine's batch at once, rather than the first alone and the others some steps behind.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Message] = []  # of this tick
        self._inbox: queue.SimpleQueue[list[Message] | None] = queue.SimpleQueue()
        self._turns: dict[str, asyncio.Future[EngineResult]] = {}
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: EngineRequest) -> EngineResult:
        """Raises what ``Engine.add`` raises. Cancelling it aborts the turn."""
        if request.request_id in self._turns:
            raise InvalidRequest(request.request_id, "a turn of that id is under way")
        future: asyncio.Future[EngineResult] = self._loop.create_future()
        self._turns[request.request_id] = future
        self._tell(lambda: self._add(request))
        try:
            return await future
        except asyncio.CancelledError:
            self._tell(lambda: self._abort(request.request_id))
            raise
        finally:
            self._turns.pop(request.request_id, None)

    async def run(self, function: Callable[[Engine], T]) -> T:
        """``function(engine)``, on the worker thread, between two of the engine's steps."""
        future: asyncio.Future[T] = self._loop.create_future()

        def task() -> None:
            try:
                self._post(_resolve, future, function(self._engine))
            except Exception as error:  # noqa: BLE001  # whoever called run() gets it
                self._post(_fail, future, error)

        self._tell(task)
        return await future

    def interrupt_all(self) -> None:
        """Every turn under way ends with what it has, before the engine's next step and what is run after this."""
        for request_id in self._turns:
            self._tell(lambda r=request_id: self._interrupt(r))  # type: ignore[misc]

    async def close(self) -> None:
        self._flush()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        if not self.failure.done():
            self.failure.set_result(None)

    def _tell(self, message: Message) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(message)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        self._inbox.put(messages)

    # ------------------------------------------------------------------ on the worker thread

    def _work(self) -> None:
        try:
            while self._take_messages():
                if results := self._engine.step():
                    self._post(self._deliver, results)
        except Exception as error:  # noqa: BLE001  # the engine broke: the instance that owns it must end
            self._post(_fail, self.failure, error)

    def _take_messages(self) -> bool:
        """Handles the inbox, waiting for a message where the engine has nothing to do. False: time to end."""
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
        if (result := self._engine.abort(request_id)) is not None:  # else its result is on the way
            self._post(self._deliver, [result])

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    # ------------------------------------------------------------------ on the event loop

    def _deliver(self, results: list[EngineResult]) -> None:
        for result in results:
            if (future := self._turns.get(result.request_id)) is not None:
                _resolve(future, result)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if (future := self._turns.get(request_id)) is not None:
            _fail(future, error)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
