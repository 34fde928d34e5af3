"""Runs blocking or CPU-heavy functions of a workflow in processes of their own, which can be killed.

A worker's pool has a limited number of processes, made when they are first needed and used again. A call that takes too
long, or is cancelled, costs its process, and the next call gets a new one.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from ...core.supervision.worker_init import search_path
from ...core.waits import OpenWaits
from ..messages import Computed, FunctionCall
from .process_calls import LENGTH, call_of, end_of, frame, message_of
from .process_main import answer_call

Result = TypeVar("Result")

START_S: Final = 600.0
"""For the imports of a process, the recipe's among them."""
_END_S: Final = 5.0


class Pool(Protocol):
    """Computes functions of a workflow somewhere else: in processes of its worker, in those of the run's reward
    services, or in a sandbox."""

    async def run(self, function: Callable[..., Any], args: Sequence[Any], timeout_s: float | None) -> Any:
        """The result of ``function(*args)``. ``timeout_s``: of the computation; None: the pool's own limit. Raises
        as ``in_process`` does."""


current_pool: ContextVar[Pool | None] = ContextVar("current_pool", default=None)
"""The pool of the worker whose workflow runs."""


async def in_process(function: Callable[..., Result], *args: Any, timeout_s: float = 60.0) -> Result:
    """The result of ``function(*args)``, computed in another process: for code that blocks, or computes for long.

    ``function``: defined at the top level of a module (``workflow.py``, one beside it, or a library's), and not
    ``async``. Arguments and results are sent as messages: plain data, arrays, dataclasses; beyond plain data only as
    the function's annotations say. ``timeout_s``: of the call, from the time on at which a process is free for it.

    Raises TimeoutError after ``timeout_s``, when the process was killed; ProcessFailed for an error of the function,
    and if the process has ended; ValueError for a function or an argument that can't be sent.
    """
    return await run_in(current_pool.get(), function, args, timeout_s)


async def run_in(
    pool: Pool | None, function: Callable[..., Result], args: Sequence[Any], timeout_s: float | None
) -> Result:
    """As ``Pool.run``. Without a pool, as in a test of a workflow, in a process that is made for it."""
    if pool is not None:
        return await pool.run(function, args, timeout_s)  # type: ignore[no-any-return]
    processes = Processes(1)
    try:
        return await processes.run(function, args, timeout_s)
    finally:
        await processes.close()


class Processes:
    """A pool of at most ``limit`` processes. ``recipe``: the folder of a recipe whose functions may be called.
    ``start_s``: for the start of one. ``whole_tracebacks``: as a recipe's config has it. ``waits``: of its calls."""

    def __init__(
        self, limit: int, recipe: str = "", start_s: float = START_S, *, whole_tracebacks: bool = False
    ) -> None:
        self._limit, self._recipe, self._start_s = limit, recipe, start_s
        self._whole_tracebacks = whole_tracebacks
        self._places = asyncio.Semaphore(limit)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._killed: set[_Process] = set()
        """Processes that were killed, and whose end was not waited for yet."""
        self.waits = OpenWaits()

    async def run(
        self, function: Callable[..., Result], args: Sequence[Any], timeout_s: float | None
    ) -> Result:
        """See ``in_process``. Waits for a process that is free. ``timeout_s``: None for 60."""
        call = call_of(function, args, 60.0 if timeout_s is None else timeout_s)
        return end_of(function, call, await self.compute(call))

    async def compute(self, call: FunctionCall) -> Computed:
        """Calls a function once a process is free. Raises OSError if no process can be started."""
        if getattr(asyncio.get_running_loop(), "is_virtual", False):  # there are no processes in virtual time
            await asyncio.sleep(0)
            return Computed(self._answer_here(call))
        loop = asyncio.get_running_loop()
        queued_at = loop.time()
        if not await self._take_place(call):
            problem = f"has got no process within {_queue_limit(call)}: all {self._limit} compute"
            return Computed(problem=problem, overran=True, queue_s=loop.time() - queued_at)
        began = loop.time()
        try:
            computed = await self._repeat(call)
            return replace(computed, queue_s=began - queued_at, compute_s=loop.time() - began)
        finally:
            self._places.release()

    async def _take_place(self, call: FunctionCall) -> bool:
        """False if none was free in time."""
        if not self._places.locked():
            return await self._places.acquire()
        limit = "" if call.queue_timeout_s is None else f"{_queue_limit(call)} ends it"
        with (
            self.waits.open(f"a process for {call.name}: all {self._limit} compute", limit),
            contextlib.suppress(TimeoutError),
        ):
            async with asyncio.timeout(call.queue_timeout_s):
                return await self._places.acquire()
        return False

    async def _repeat(self, call: FunctionCall) -> Computed:
        """Calls the function, and again if its process has ended, as often as the call may."""
        retries = 0
        with self.waits.open(f"{call.name}, which computes", f"{call.setting}={call.timeout_s:g} ends it"):
            while True:
                try:
                    return Computed(await self._answer(call), retries=retries)
                except _Ended as ended:
                    if retries >= call.retries or not ended.may_succeed_again:
                        again = f", {retries + 1} times" if retries else ""
                        return Computed(problem=f"{ended}{again}", overran=ended.overran, retries=retries)
                retries += 1

    def _answer_here(self, call: FunctionCall) -> bytes:
        folder = Path(self._recipe).resolve() if self._recipe else None
        message = message_of(call.body[LENGTH.size :])
        return answer_call(message, folder, whole_tracebacks=self._whole_tracebacks)[LENGTH.size :]

    async def _answer(self, call: FunctionCall) -> bytes:
        """Raises _Ended without an answer."""
        process = await self._free()
        try:
            async with asyncio.timeout(call.timeout_s) as deadline:
                answer = await process.answer(call.body)
        except TimeoutError:
            if not deadline.expired():  # an OSError too
                raise _Ended(await process.ended(), may_succeed_again=True) from None
            raise _Ended(f"took longer than {call.setting}={call.timeout_s:g}", overran=True) from None
        except (asyncio.IncompleteReadError, OSError):
            raise _Ended(await process.ended(), may_succeed_again=True) from None
        else:
            self._idle.append(process)
            return answer
        finally:
            if process not in self._idle:
                self._drop(process)

    async def close(self) -> None:
        """Kills all processes, also those that compute, and waits for the end of all that were killed."""
        for process in list(self._all):
            self._drop(process)
        self._idle.clear()
        # Also that of a cancelled call: its pipes would stay open in a loop that is closed now.
        while self._killed:
            await self._killed.pop().ended()

    async def _free(self) -> "_Process":
        """Raises _Ended if a new process does not begin."""
        while self._idle:
            process = self._idle.pop()
            if process.runs:
                return process
            self._drop(process)
        process = await _Process.start()
        self._all.add(process)
        init = {
            "paths": search_path(),
            "recipe": self._recipe,
            "whole_tracebacks": self._whole_tracebacks,
        }
        lost = False
        try:
            async with asyncio.timeout(self._start_s):
                problem = message_of(await process.answer(frame(init)))
        except TimeoutError:  # an OSError too, but not the end of the process
            problem = f"its process is not ready after {self._start_s:g} s, imports included"
        except (asyncio.IncompleteReadError, OSError):
            problem, lost = await process.ended(), True
        except BaseException:
            self._drop(process)
            raise
        if problem:
            self._drop(process)
            await process.ended()
            raise _Ended(problem, may_succeed_again=lost)
        return process

    def _drop(self, process: "_Process") -> None:
        if process in self._all:
            process.kill()
            self._all.discard(process)
            self._killed = {other for other in self._killed if other.runs} | {process}


def _queue_limit(call: FunctionCall) -> str:
    return f"rewards.queue_timeout_s={call.queue_timeout_s:g}"  # of rewards alone: other calls have no limit


class _Ended(Exception):
    """A call has no answer. ``overran``: of its deadline. ``may_succeed_again``: its process has ended by itself."""

    def __init__(self, problem: str, *, overran: bool = False, may_succeed_again: bool = False) -> None:
        super().__init__(problem)
        self.overran, self.may_succeed_again = overran, may_succeed_again


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "_Process":
        """Starts one in a process group of its own, with this process's environment. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "flexmarl.actors.environments.process_main", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        return cls(process)

    @property
    def runs(self) -> bool:
        return self._process.returncode is None

    async def answer(self, call: bytes) -> bytes:
        """The body of the answer's frame. Raises IncompleteReadError or OSError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(call)
        await self._process.stdin.drain()
        head = await self._process.stdout.readexactly(LENGTH.size)
        return await self._process.stdout.readexactly(LENGTH.unpack(head)[0])

    def kill(self) -> None:
        """Kills the processes of its group: itself, unless it has ended, and those that it has started. To be called
        once: later the group's number may be another one's."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def ended(self) -> str:
        """Waits for its end, at most ``_END_S``. Returns the way in which it has ended."""
        try:
            code = await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            return f"its process does not end within {_END_S:g} s"
        return (
            f"its process was killed by signal {-code}"
            if code < 0
            else f"its process ended with status {code}"
        )
