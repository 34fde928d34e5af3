"""T11 on the CPU: the actors of a run are forked, and what an import has started is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu.actor_start import start_all
from scripts.gpu.checks import Card
from scripts.gpu.import_threads import main

from ...patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


def test_actors_are_forked_and_a_recipe_may_ask_for_cuda(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else numpy starts threads when it is imported
    paths = [str(ROOT / "scripts" / "src")]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    checks = {check.name: check for check in start_all(card, PATIENCE_S)}
    assert not [check for check in checks.values() if check.passed is False]
    assert checks["forks: log of the process that forks"].value == "empty"
    assert checks["recipe that asks for CUDA: exit status"].passed
    assert not [name for name in checks if "threads and devices of" in name]


def test_the_innermost_import_that_starts_a_thread_is_named(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text("import inner\nimport wave\n")
    (tmp_path / "inner.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, name='endless', daemon=True).start()\n"
        "import colorsys\n"
    )
    program = f"from {main.__module__} import main; main(['outer'])"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path += {[str(ROOT), str(tmp_path)]}; {program}"],
        capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert '"causes": [["inner", ["thread endless"]]]' in ended.stdout
