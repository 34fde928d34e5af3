"""The recipe's data, as the orchestrator calls for it: each call in a thread, with a deadline."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ....core.system import ActorSystem
from ....core.waits import Wait
from ...errors import RecipeError
from ...recipe.recipe import Recipe
from ...recipe.recipe_lines import lines_of_threads

T = TypeVar("T")


class RecipeData:
    def __init__(self, recipe: Recipe, system: Callable[[], ActorSystem], timeout_s: float) -> None:
        """``system``: returns the actor's, which an actor has once it has started."""
        self._recipe = recipe
        self._system = system
        self._timeout_s = timeout_s
        self._calls: list[tuple[Callable[[], str], float]] = []
        """The functions under way, and the times at which the calls began."""

    async def call(self, function: Callable[[], str], work: Callable[[], T]) -> T:
        """The result of ``work``. ``function``: returns the name of the recipe's function that it calls now.

        Raises what ``work`` raises, and RecipeError after ``timeout_s``.
        """
        call = function, asyncio.get_running_loop().time()
        self._calls.append(call)
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await self._system().run_blocking(work, abandon=True)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RecipeError(
                f"{self._recipe.file}: {function()} has not returned within training.data_timeout_s="
                f"{self._timeout_s:g}{self._place()}"
            ) from None
        finally:
            self._calls.remove(call)

    def waits(self) -> list[Wait]:
        """The calls of the recipe's functions under way, with the line at which its code stands, and since when."""
        now, limit = asyncio.get_running_loop().time(), f"training.data_timeout_s={self._timeout_s:g} ends it"
        return [
            Wait(f"{function()} of {self._recipe.file.name}{self._place()}", now - began, limit)
            for function, began in self._calls
        ]

    def _place(self) -> str:
        """The line at which the recipe's code stands."""
        lines = lines_of_threads(self._recipe.folder)
        return f", at {lines[0]}" if lines else ""
