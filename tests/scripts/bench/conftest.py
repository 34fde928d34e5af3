"""``scripts/bench/run`` as a program, without the installation that it begins with."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it beside a ``lib.sh`` that installs nothing: the tests' Python has all that it needs."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "lib.sh").write_text(f"root={ROOT}\nvenv_python={sys.executable}\ninstall() {{ :; }}\n")
    copy = folder / "bench" / "run"
    copy.parent.mkdir()
    copy.write_text((ROOT / "scripts" / "bench" / "run").read_text())
    copy.chmod(0o755)
    return copy
