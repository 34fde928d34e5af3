"""The computations of one policy in a shared pool, in their order, and again if their slot is lost. Pure."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Computation:
    """``run``: at the policy's gang, which it is given. ``changes_base``: it ends with other weights or moments, and
    once these are in the host's memory (``saved``), nothing of it and of those before is needed any more. ``repeated``:
    its gradient is a part of the step, so that it runs again if the step's state is lost. ``done`` and ``saved`` have
    its error if there will be no result."""

    name: str
    run: Callable[[Any], Awaitable[Any]]
    changes_base: bool = False
    repeated: bool = False
    failed: bool = False
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    saved: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def succeed(self, result: Any) -> None:
        """Ignored if it has succeeded before, or its caller has left."""
        if not self.done.done():
            self.done.set_result(result)

    def fail(self, error: BaseException) -> bool:
        """Its caller gets ``error``, unless it has a result already, or has left: then False is returned."""
        self.failed = True
        has_caller = not self.done.done()
        if has_caller:
            self.done.set_exception(error)
        if not self.saved.done():
            self.saved.set_exception(error)
            self.saved.exception()  # asyncio logs an error that no caller takes, and most are not waited for
        return has_caller


class PolicyWork:
    """``running``: the computation that runs. ``since``: the time of its beginning, or of the end of the one before it.
    ``ended``: number of computations that have ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.running: Computation | None = None
        self.since = clock()
        self.ended = 0
        self._clock = clock
        self._waiting: deque[Computation] = deque()
        self._since_base: list[Computation] = []
        self._unsaved: Computation | None = None

    @property
    def is_waiting(self) -> bool:
        """True if a computation waits to be begun."""
        return bool(self._waiting)

    @property
    def is_unsaved(self) -> bool:
        """True from the end of a computation that changes the base state until that is in the host's memory."""
        return self._unsaved is not None

    def add(self, computation: Computation) -> None:
        """``computation`` waits, behind all others."""
        if self.running is None and not self._waiting:
            self.since = self._clock()
        self._waiting.append(computation)

    def begin(self) -> Computation:
        """The next one, which runs from now on."""
        assert self.running is None, "one computation of a policy at a time"
        self.running = self._waiting.popleft()
        self.since = self._clock()
        return self.running

    def end(self) -> None:
        """The running one has ended, with success or not."""
        ended, self.running = self.running, None
        assert ended is not None
        self.ended += 1
        self.since = self._clock()
        if ended.failed:
            return
        if ended.changes_base:
            assert self._unsaved is None, "the base state before is saved first"
            self._unsaved = ended
        if ended.changes_base or ended.repeated:
            self._since_base.append(ended)

    def save(self) -> None:
        """The base state that the last one left which has changed it is in the host's memory."""
        assert self._unsaved is not None
        del self._since_base[: self._since_base.index(self._unsaved) + 1]
        if not self._unsaved.saved.done():
            self._unsaved.saved.set_result(None)
        self._unsaved = None

    def lose(self) -> list[Computation]:
        """Only the last base state that was saved is left: the computations since then and the running one wait again,
        in their order. Returns them."""
        again, self._since_base, self._unsaved = self._since_base, [], None
        if self.running is not None:
            again.append(self.running)
            self.running = None
        self._waiting.extendleft(reversed(again))
        return again

    def fail(self, error: BaseException) -> bool:
        """None of those that run or wait can succeed. Returns True if a caller gets ``error``."""
        failing = (*self._since_base, self.running, *self._waiting)
        # A list: any() alone would leave out those behind the first that has a caller.
        has_caller = [computation.fail(error) for computation in failing if computation is not None]
        self.running = None
        self._waiting.clear()
        return any(has_caller)
