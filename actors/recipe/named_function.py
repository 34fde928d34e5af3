"""Functions of the user's that a config names: ``file.py:function`` or ``module:function``."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError
from .recipe import module_of


def named_function(folder: Path, name: str) -> Callable[..., Any]:
    """The function ``file.py:function`` in a recipe's ``folder``, or ``module:function`` of a module that Python
    imports: one beside ``workflow.py`` too, once a recipe is loaded. Raises ConfigError if it is missing; any error of
    the module."""
    place, _, function = name.partition(":")
    candidate = getattr(_module(folder, place), function, None)
    if not callable(candidate):
        raise ConfigError(f"{place} has no function {function!r}")
    return cast(Callable[..., Any], candidate)


def _module(folder: Path, place: str) -> Any:
    if place.endswith(".py"):
        file = folder / place
        if not file.is_file():
            raise ConfigError(f"{file} does not exist")
        return module_of(file, f"flexmarl_recipe_{folder.name}_{file.stem}")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # of a module that this one imports
        raise ConfigError(
            f"Python finds no module {place!r}; of a file in the recipe's folder write file.py:function"
        ) from None
