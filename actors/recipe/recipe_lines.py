"""Finds the lines of a recipe at which its code runs or waits now.

Threads are looked at from their innermost frame outwards. A suspended task is a chain of coroutines, each of which
awaits the next one; where one of them waits for further tasks (``gather``, ``wait``, ``TaskGroup``, ``wait_for``), the
recipe's code may stand in any of those, so they are followed too.
"""

import asyncio
import gc
import linecache
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Final

_ASYNCIO: Final = Path(asyncio.__file__).parent
_WRAPPERS: Final = ("async_generator_asend", "async_generator_athrow", "anext_awaitable", "coroutine_wrapper")
_MOST_TASKS: Final = 1000
"""Tasks of one workflow beyond this number are not looked at."""


def line_within(folder: Path, frame: FrameType | None) -> str | None:
    """The innermost line of a file in ``folder``: ``workflow.py:12, in workflow: time.sleep(5)``; None without one."""
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(folder):
            return _line(folder, frame)
        frame = frame.f_back
    return None


def line_of_error(folder: Path, error: BaseException) -> str | None:
    """The innermost line of a file in ``folder`` that an error, or the first of a group, has come through; None without
    one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    places = [
        (frame, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if Path(frame.f_code.co_filename).is_relative_to(folder)
    ]
    return _line(folder, places[-1][0], places[-1][1]) if places else None


def lines_of_threads(folder: Path) -> list[str]:
    """The innermost line of the recipe in each thread of this process that runs its code."""
    lines = (line_within(folder, frame) for frame in sys._current_frames().values())
    return [line for line in lines if line is not None]


def lines_of_task(folder: Path, task: "asyncio.Task[Any]") -> list[str]:
    """The innermost lines of the recipe at which a suspended task waits: one, or one of each task that it waits for.
    Empty if it has ended, or waits nowhere in the recipe."""
    chains = [_of_recipe(folder, chain) for chain in _chains(task)]
    return list(dict.fromkeys(_line(folder, frames[-1]) for frames in chains if frames))


def innermost_frames(folder: Path, task: "asyncio.Task[Any]") -> list[FrameType]:
    """The frames of a suspended task, the outermost first; those of the first task that it waits for in the recipe
    included."""
    chains = list(_chains(task))
    return next((chain for chain in chains if _of_recipe(folder, chain)), chains[0] if chains else [])


def _of_recipe(folder: Path, chain: list[FrameType]) -> list[FrameType]:
    return [frame for frame in chain if Path(frame.f_code.co_filename).is_relative_to(folder)]


def _chains(task: "asyncio.Task[Any]") -> Iterator[list[FrameType]]:
    """The frames of a task and of those that it waits for: a chain for each task that waits for no other one."""
    seen = {task}
    queue: list[tuple[asyncio.Task[Any], list[FrameType]]] = [(task, [])]
    while queue and len(seen) < _MOST_TASKS:
        waiting, outer = queue.pop()
        frames = _frames(waiting.get_coro())
        chain = outer + frames
        awaited = [
            other for other in _awaited_tasks(waiting, frames) if other not in seen and not other.done()
        ]
        if not awaited:
            yield chain
        seen.update(awaited)
        queue += [(other, chain) for other in awaited]


def _frames(awaitable: Any) -> list[FrameType]:
    """The frames of a suspended coroutine, and of all that it awaits."""
    frames: list[FrameType] = []
    while awaitable is not None:
        for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            if (frame := getattr(awaitable, f"{kind}_frame", None)) is not None:
                frames.append(frame)
                awaitable = getattr(awaitable, inner)
                break
        else:
            awaitable = _unwrap(awaitable)
    return frames


def _unwrap(awaitable: Any) -> Any:
    """The coroutine or generator within what ``async for``, ``anext`` or ``__await__`` awaits; None without one. Those
    objects of the interpreter have no attribute for it."""
    if type(awaitable).__name__ not in _WRAPPERS:
        return None
    inner = (CoroutineType, AsyncGeneratorType, GeneratorType)
    referents = gc.get_referents(awaitable)
    return next((r for r in referents if isinstance(r, inner) or type(r).__name__ in _WRAPPERS), None)


def _awaited_tasks(task: "asyncio.Task[Any]", frames: list[FrameType]) -> "Iterator[asyncio.Task[Any]]":
    """The tasks that ``task`` waits for: by the future of its ``await``, or in a frame of asyncio's own."""
    future = getattr(task, "_fut_waiter", None)
    # The future of a ``shield`` knows its task by a callback alone.
    callbacks = (callback for callback, _ in getattr(future, "_callbacks", None) or ())
    cells = (cell for callback in callbacks for cell in getattr(callback, "__closure__", None) or ())
    for candidate in (future, *getattr(future, "_children", ()), *(cell.cell_contents for cell in cells)):
        if isinstance(candidate, asyncio.Task):
            yield candidate
    for frame in frames:
        if Path(frame.f_code.co_filename).is_relative_to(_ASYNCIO):
            for value in frame.f_locals.values():
                yield from _tasks_in(value)


def _tasks_in(value: Any) -> "Iterator[asyncio.Task[Any]]":
    if isinstance(value, asyncio.TaskGroup):
        value = value._tasks  # there is no public way
    for candidate in value if isinstance(value, set | list | tuple) else (value,):
        if isinstance(candidate, asyncio.Task):
            yield candidate


def _line(folder: Path, frame: FrameType, number: int | None = None) -> str:
    """``number``: of the line; None: of the one that runs now."""
    file, number = Path(frame.f_code.co_filename), frame.f_lineno if number is None else number
    source = linecache.getline(str(file), number or 0).strip()
    return f"{file.relative_to(folder)}:{number}, in {frame.f_code.co_name}: {source}"
