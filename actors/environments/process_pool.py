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
from typing import Any, Final, Protocol, TypeVar

from ...core.supervision.worker_init import search_path
from ..errors import ProcessFailed
from .process_calls import LENGTH, frame, message_of, result_of

Result = TypeVar("Result")

_START_S: Final = 600.0
"""For the imports of a process, the recipe's among them."""
_END_S: Final = 5.0


class Pool(Protocol):
    """The interface by which ``in_process`` reaches the pool of its worker."""

    async def run(self, function: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> Any:
        """The result of ``function(*args)``, computed in another process. See ``in_process`` for ``timeout_s`` and
        errors."""


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
    if timeout_s <= 0:
        raise ValueError(f"in_process: timeout_s={timeout_s!r} must be positive")
    pool = current_pool.get()
    if pool is not None:
        return await pool.run(function, args, timeout_s)  # type: ignore[no-any-return]
    processes = Processes(1)  # outside a run, as in a test of a workflow
    try:
        return await processes.run(function, args, timeout_s)  # type: ignore[no-any-return]
    finally:
        await processes.close()


class Processes:
    """A pool of at most ``limit`` processes. ``recipe``: the folder of a recipe whose functions may be called.
    ``start_s``: for the start of one. ``whole_tracebacks``: as a recipe's config has it."""

    def __init__(
        self, limit: int, recipe: str = "", start_s: float = _START_S, *, whole_tracebacks: bool = False
    ) -> None:
        self._recipe, self._start_s, self._whole_tracebacks = recipe, start_s, whole_tracebacks
        self._places = asyncio.Semaphore(limit)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def run(self, function: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> Any:
        """See ``in_process``. Waits for a process that is free."""
        name = _full_name(function)
        if getattr(asyncio.get_running_loop(), "is_virtual", False):  # there are no processes in virtual time
            await asyncio.sleep(0)
            return function(*args)
        call = frame({"module": function.__module__, "name": function.__qualname__, "args": list(args)})
        async with self._places:
            process = await self._free()
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    answer = await process.answer(call)
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise TimeoutError(f"{name} took longer than timeout_s={timeout_s:g}") from None
            except (asyncio.IncompleteReadError, OSError):
                raise ProcessFailed(name, await process.ended()) from None
            else:
                self._idle.append(process)
            finally:
                if process not in self._idle:
                    self._drop(process)
        if "result" in answer:
            return result_of(function, answer["result"])
        raise ProcessFailed(name, f"{answer['kind']}: {answer['text']}", answer["traceback"])

    async def close(self) -> None:
        """Kills all processes, also those that compute, and waits for their end."""
        ending = list(self._all)
        for process in ending:
            self._drop(process)
        self._idle.clear()
        for process in ending:
            await process.ended()

    async def _free(self) -> "_Process":
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
        try:
            async with asyncio.timeout(self._start_s):
                problem = await process.answer(frame(init))
        except TimeoutError:  # an OSError too, but not the end of the process
            problem = f"its process is not ready after {self._start_s:g} s, imports included"
        except (asyncio.IncompleteReadError, OSError):
            problem = await process.ended()
        except BaseException:
            self._drop(process)
            raise
        if problem:
            self._drop(process)
            await process.ended()
            raise ProcessFailed("in_process", problem)
        return process

    def _drop(self, process: "_Process") -> None:
        if process in self._all:
            process.kill()
            self._all.discard(process)


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

    async def answer(self, call: bytes) -> Any:
        """Raises IncompleteReadError or OSError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(call)
        await self._process.stdin.drain()
        head = await self._process.stdout.readexactly(LENGTH.size)
        return message_of(await self._process.stdout.readexactly(LENGTH.unpack(head)[0]))

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


def _full_name(function: Callable[..., Any]) -> str:
    """Raises ValueError for a function that another process can't find by its name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    target: Any = sys.modules.get(module or "")
    for part in (name or "").split("."):
        target = getattr(target, part, None)
    if module is None or name is None or target is not function:
        raise ValueError(f"in_process: {function!r} is not at the top level of a module")
    if module == "__main__":
        raise ValueError(
            f"in_process: {name} is in the main program: put it into a module that can be imported"
        )
    if asyncio.iscoroutinefunction(function):
        raise ValueError(f"in_process: {module}.{name} is async: await it")
    return f"{module}.{name}"
