"""The computations of a process: each has a name, and a deadline from the moment it begins."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ....core.waits import Wait
from ...errors import ComputationOverran
from ...recipe.recipe_lines import lines_of_threads
from ..backends.backend_factory import BackendFactory

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Computation:
    """``began``: the time at which the one before has ended; None while it has not. ``is_answered``: its caller has the
    result, or has gone. ``runs``: its function has been called, and has not returned."""

    name: str
    took: Callable[[float], None]
    began: float | None = None
    is_answered: bool = False
    runs: bool = False


class Computations:
    """``ended``: their number. One that hangs can't be interrupted: its actor has to end."""

    def __init__(self, factory: BackendFactory, timeout_s: float, recipe: Path) -> None:
        """``recipe``: the folder of its code, some of which is called in computations."""
        self.ended = 0
        self._factory = factory
        self._timeout_s = timeout_s
        self._recipe = recipe
        self._order: deque[_Computation] = deque()

    async def run(
        self, name: str, function: Callable[[], T], took: Callable[[float], None] = lambda seconds: None
    ) -> T:
        """The result of ``function()``, after all earlier computations. ``name``: for people, such as ``a micro-batch
        of solver``. ``took``: is called with its seconds when it has ended. Raises ComputationOverran."""
        loop = asyncio.get_running_loop()
        computation = _Computation(name, took)
        self._order.append(computation)
        self._begin_first()

        def call() -> T:  # perhaps by another thread
            computation.runs = True
            try:
                return function()
            finally:
                computation.runs = False
                if computation.is_answered:
                    with contextlib.suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(self._end, computation)

        computing = asyncio.ensure_future(self._factory.compute(call))
        computing.add_done_callback(lambda _: self._report_answer(computation))
        try:
            while not computing.done():
                first = self._order[0]
                assert first.began is not None, "the first one has begun"
                left_s = first.began + self._timeout_s - loop.time()
                if left_s <= 0:
                    raise ComputationOverran(first.name, self._timeout_s)
                await asyncio.wait([computing], timeout=left_s)
        finally:
            computing.cancel()
        return computing.result()

    def _report_answer(self, computation: _Computation) -> None:
        computation.is_answered = True
        # A computation that still runs has lost its caller: the next one begins only when its function returns.
        if not computation.runs:
            self._end(computation)

    def _end(self, computation: _Computation) -> None:
        if computation in self._order:  # the function may have returned while its caller was cancelled
            self.ended += 1
            self._order.remove(computation)
            if computation.began is not None:
                computation.took(asyncio.get_running_loop().time() - computation.began)
            self._begin_first()

    def _begin_first(self) -> None:
        if self._order and self._order[0].began is None:
            self._order[0].began = asyncio.get_running_loop().time()

    def waits(self) -> list[Wait]:
        """The computation that runs."""
        if not self._order or (began := self._order[0].began) is None:
            return []
        lines = "; ".join(lines_of_threads(self._recipe))
        text = f"{self._order[0].name}, which computes" + (f" at {lines}" if lines else "")
        limit = f"training.compute_timeout_s={self._timeout_s:g} ends it"
        return [Wait(text, asyncio.get_running_loop().time() - began, limit)]
