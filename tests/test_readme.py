"""What the README shows is run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n# greeting\.py\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("arguments", [["greeting.py"], ["-m", "greeting"]], ids=["script", "module"])
def test_the_runtime_by_itself(arguments: list[str], tmp_path: Path) -> None:
    found = BLOCK.search((ROOT / "README.md").read_text())
    assert found is not None
    (tmp_path / "greeting.py").write_text(found[1])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("good morning world\n[0, 1, 2]\n", "", 0)
