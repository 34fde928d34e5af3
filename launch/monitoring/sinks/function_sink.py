"""Calls a function of the user's with the figures of each step and evaluation."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....actors.errors import ConfigError
from ....actors.recipe.named_function import named_function
from .sink import Figures, Sink, SinkRun

MetricsFunction = Callable[[int, Mapping[str, float]], object]
"""Gets the step and its figures by their keys in ``metrics.jsonl``; an evaluation comes before its step, with keys
that begin with ``eval/``."""


class FunctionSink(Sink):
    """Calls the function again for the steps that a resumed run repeats."""

    appends_only = False

    def __init__(self, function: MetricsFunction | str) -> None:
        """``function``: itself, or ``file.py:function`` within the recipe's folder."""
        self._source = function
        self._function: MetricsFunction | None = None

    def open(self, run: SinkRun, series: str) -> tuple[str, str]:
        source = self._source
        self._function = load_function(run.recipe, source) if isinstance(source, str) else source
        return "", source if isinstance(source, str) else name_of(source)

    def write(self, figures: Figures) -> None:
        assert self._function is not None, "it was opened"
        self._function(figures.step, figures.figures)

    def close(self, failed: bool) -> None: ...


def name_of(function: Any) -> str:
    """For people. A ``partial`` and an object that can be called have the name of their class."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def load_function(recipe: Path, name: str) -> MetricsFunction:
    """See ``named_function``. Raises ConfigError too if it does not take step and figures."""
    return check_function(named_function(recipe, name), name)


def check_function(function: Any, name: str) -> MetricsFunction:
    """``function``. Raises ConfigError if it can't be called with step and figures."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(
            f"{name} is async: it is called in a thread, write def {name_of(function)}(step, figures)"
        )
    try:
        inspect.signature(function).bind(0, {})
    except TypeError as error:
        raise ConfigError(f"{name}: {error}: write def {name_of(function)}(step, figures)") from None
    except ValueError:  # a function without a signature, written in C
        pass
    result: MetricsFunction = function
    return result
