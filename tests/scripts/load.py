"""Scripts as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def script(name: str) -> ModuleType:
    """One of ``scripts/bench``."""
    return load(BENCH / f"{name}.py")


def load(path: Path) -> ModuleType:
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
