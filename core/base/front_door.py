"""Front doors of packages: names that are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_exports(door: str, modules: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of the module named ``door``: imports each name when it is first used.

    ``modules``: the names by the module that defines them, relative to the package of ``door``.

        if not TYPE_CHECKING:
            __getattr__ = lazy_exports(__name__, {"actor": ["Actor", "endpoint"]})
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        module = sys.modules[door]
        value = getattr(importlib.import_module(f".{module_of[name]}", module.__package__), name)
        setattr(module, name, value)  # the next use finds it there
        return value

    return load
