"""The names that users import: from ``flexmarl.core``, ``flexmarl.transport`` and ``flexmarl.testing``."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.core.base.front_door import lazy_exports

from .patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
DOORS = ("flexmarl", "flexmarl.core", "flexmarl.transport", "flexmarl.actors", "flexmarl.testing")
HEAVY = {"torch", "numpy", "transformers"}


def loaded_by(program: str) -> set[str]:
    """The modules that a new process has imported after ``program``."""
    code = f"{program}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    environment = {"PYTHONPATH": str(ROOT / "scripts" / "src")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("door", DOORS)
def test_every_name_can_be_imported(door: str) -> None:
    module = importlib.import_module(door)
    assert module.__all__ and len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        found = getattr(module, name)
        assert found.__name__ == name and found.__module__.startswith("flexmarl.")
    with pytest.raises(AttributeError, match=f"'{door}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_the_runtime_needs_no_arrays_and_logs_without_structlog() -> None:
    loaded = loaded_by(
        "import flexmarl.core\nfor name in flexmarl.core.__all__: getattr(flexmarl.core, name)"
    )
    assert "flexmarl.core.system" in loaded and "zmq" in loaded
    assert not loaded & (HEAVY | {"structlog", "psutil", "uvloop", "rich"})


def test_an_actors_process_starts_without_rich_which_can_be_imported_afterwards() -> None:
    program = """
import flexmarl.core.worker.worker_main, io, sys
from flexmarl.core.telemetry import configure_logging, get_logger
configure_logging("store", sys.stderr)
get_logger("x").error("y")
"""
    loaded = loaded_by(program)
    assert "structlog" in loaded and not loaded & (HEAVY | {"rich"})
    assert {"structlog", "rich.console"} <= loaded_by(f"{program}\nimport rich.console")


def test_a_door_imports_nothing_before_it_is_used() -> None:
    assert not loaded_by("import flexmarl") & {"flexmarl.launch", "asyncio"}
    loaded = loaded_by("import flexmarl.core, flexmarl.transport, flexmarl.testing")
    assert not {"flexmarl.core.system", "flexmarl.core.actor", "flexmarl.core.testing.virtual_time"} & loaded
    assert "flexmarl.core.wire.memory" in loaded_by("from flexmarl.testing import MemoryNetwork")
    assert not loaded_by("from flexmarl.testing import MemoryNetwork, run") & HEAVY


def test_a_name_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    load = lazy_exports("flexmarl.core", {"actor": ["Actor"]})
    core = importlib.import_module("flexmarl.core")
    monkeypatch.delitem(vars(core), "Actor", raising=False)
    actor = load("Actor")
    assert vars(core)["Actor"] is actor is importlib.import_module("flexmarl.core.actor").Actor


def test_simulated_actors_need_no_torch() -> None:
    """Nor does a transfer between them: a run of them starts in half the time."""
    program = """
import asyncio, tempfile
from pathlib import Path
import flexmarl.actors.inference.instance, flexmarl.actors.trainer.trainer
import flexmarl.actors.trainer.backends.simulated_factory
from flexmarl.actors.inference.engines.simulated_engine import SimulatedEngine
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.trainer.backends.simulated_policy import SimulatedPolicy, SimulatedTrainerConfig
from flexmarl.transport import StateTransport

async def main():
    policy = SimulatedPolicy("solver", SimulatedTrainerConfig(), seed=0, sleep=lambda seconds: None)
    engine = SimulatedEngine(SimulatedEngineConfig())
    with tempfile.TemporaryDirectory() as folder:
        async with StateTransport(Path(folder)) as trainer, StateTransport(Path(folder)) as instance:
            handle = await trainer.set("solver", policy.weights(), version=0)
            await engine.load(handle, instance)

asyncio.run(main())
"""
    assert not loaded_by(program) & {"torch", "transformers"}
