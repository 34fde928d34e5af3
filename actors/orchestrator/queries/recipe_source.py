"""The query source of a recipe, with what may go wrong in the user's code named. Everything here blocks: it runs in a
thread."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import RecipeError
from ...messages import Query
from ...recipe.query_source import GroupEnd, QuerySource
from ...recipe.recipe import Recipe
from .position_source import PositionSource
from .queries_state import QueriesState


class RecipeSource:
    """The source that ``query_source`` of the recipe returns, or that the config names; without either, the positions
    of ``train_query``.

    The positions are saved and compared apart from the source's own state, so that ``--accept data`` covers every
    recipe, and a source's author has no part in it.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Raises RecipeError if ``query_source`` fails, or returns something else."""
        self.function = "train_query"
        """The function of the recipe that is being called, or was the last."""
        self._recipe = recipe
        self._positions = PositionSource(recipe.train_query)
        self._source: QuerySource | None = None
        if recipe.has_source:
            self._source = recipe.query_source(_SavedApart(self._positions))

    def draw(self, ends: Sequence[GroupEnd], step: int, count: int) -> tuple[list[Query], dict[str, float]]:
        """The source hears of ``ends``, then gives queries; its figures after that. Raises RecipeError if the recipe's
        code fails."""
        self._hear(ends)
        return [self._next(step) for _ in range(count)], self._figures()

    def state_after(self, ends: Sequence[GroupEnd]) -> QueriesState:
        """The source hears of ``ends``; its state after that. Raises RecipeError as ``draw``, and if the state is
        something else than plain data."""
        self._hear(ends)
        if self._source is None:
            return QueriesState(positions=self._positions.state())
        with self._calling(self._source, "state"):
            state: object = self._source.state()
        source = _plain_copy(state, f"{self._recipe.file}: {self.function}")
        return QueriesState(positions=self._positions.state(), source=source)

    def restore(self, state: QueriesState) -> None:
        """Raises RecipeError as ``draw``, DataChanged if the training data has changed."""
        if state.positions:
            self._positions.restore(state.positions)
        if self._source is not None and state.source is not None:
            with self._calling(self._source, "restore"):
                self._source.restore(state.source)

    def _hear(self, ends: Sequence[GroupEnd]) -> None:
        if self._source is not None:
            with self._calling(self._source, "closed"):
                for end in ends:
                    self._source.closed(end)

    def _next(self, step: int) -> Query:
        if self._source is None:
            return self._positions.next(step)
        with self._calling(self._source, "next"):
            query: object = self._source.next(step)
        return self._recipe.check_query(query, self.function)

    def _figures(self) -> dict[str, float]:
        if self._source is None:
            return {}
        with self._calling(self._source, "figures"):
            figures: dict[Any, Any] = dict(self._source.figures())
        for name, value in figures.items():
            if not (isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)):
                raise RecipeError(
                    f"{self._recipe.file}: {self.function} gives {name!r}: {value!r}, not a name and a finite number"
                )
        return figures

    @contextmanager
    def _calling(self, source: QuerySource, method: str) -> Iterator[None]:
        self.function = f"{type(source).__name__}.{method}"
        with self._recipe.users_code(self.function):
            yield


class _SavedApart(QuerySource):
    """A source for the recipe's own to draw from, whose state is not a part of that one's."""

    def __init__(self, source: QuerySource) -> None:
        self._source = source

    def next(self, step: int) -> Query:
        return self._source.next(step)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Does nothing: the positions are restored by themselves."""


def _plain_copy(state: object, where: str) -> dict[str, Any]:
    """A copy of ``state``, as a checkpoint gives it back. Raises RecipeError if that would differ."""
    words = (
        f"{where} must give a dictionary of plain data: dictionaries with string keys, lists, strings, finite numbers, "
        "booleans and None"
    )
    try:
        copy: object = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{words}; {error}") from None
    if not isinstance(copy, dict):
        raise RecipeError(f"{words}; it gives {type(state).__name__}")
    if (difference := _difference(state, copy, "")) is not None:
        raise RecipeError(f"{words}; it gives {difference}")
    return copy


def _difference(state: object, copy: object, place: str) -> str | None:
    """The first part of ``state`` that JSON does not give back: a tuple, or a key that is a number."""
    if isinstance(state, dict) and isinstance(copy, dict):
        for key, value in state.items():
            if not isinstance(key, str):
                return f"the key {key!r}{place}"
            if (difference := _difference(value, copy[key], f" in {key!r}{place}")) is not None:
                return difference
        return None
    if isinstance(state, list) and isinstance(copy, list):
        differences = (_difference(*pair, place) for pair in zip(state, copy, strict=True))
        return next((difference for difference in differences if difference is not None), None)
    return None if state == copy else f"{type(state).__name__}{place}"
