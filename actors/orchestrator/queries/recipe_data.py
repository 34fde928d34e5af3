"""The recipe's data, as the orchestrator calls for it: each call in a thread, with a deadline."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from ....core.actor import System
from ....core.waits import Wait
from ...errors import RecipeError
from ...messages import Query
from ...recipe import Recipe
from ...recipe_lines import lines_of_threads

T = TypeVar("T")


class RecipeData:
    def __init__(self, recipe: Recipe, system: Callable[[], System], timeout_s: float) -> None:
        """``system``: returns the actor's, which an actor has once it has started."""
        self._recipe = recipe
        self._system = system
        self._timeout_s = timeout_s
        self._calls: dict[str, float] = {}
        """The calls under way, and the times of their beginnings."""

    async def train_queries(self, positions: Iterable[int]) -> list[Query]:
        """Raises RecipeError, also after ``timeout_s``."""
        return await self._called("train_query", lambda: [*map(self._recipe.train_query, positions)])

    async def eval_queries(self) -> list[Query]:
        """Raises RecipeError, also after ``timeout_s``."""
        return await self._called("eval_queries", self._recipe.eval_queries)

    async def _called(self, function: str, call: Callable[[], T]) -> T:
        self._calls[function] = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await self._system().run_blocking(call, abandon=True)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RecipeError(
                f"{self._recipe.file}: {function} has not returned within training.data_timeout_s="
                f"{self._timeout_s:g}{self._place()}"
            ) from None
        finally:
            del self._calls[function]

    def waits(self) -> list[Wait]:
        now, limit = asyncio.get_running_loop().time(), f"training.data_timeout_s={self._timeout_s:g} ends it"
        return [
            Wait(f"{function} of {self._recipe.file.name}{self._place()}", now - began, limit)
            for function, began in self._calls.items()
        ]

    def _place(self) -> str:
        """The line at which the recipe's code stands."""
        lines = lines_of_threads(self._recipe.folder)
        return f", at {lines[0]}" if lines else ""
