"""Programs of tests, each in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "scripts" / "src"
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
"""Variables of a session of pytest that a test begins: the installed plugins take most of the time of its start."""


@contextmanager
def process(script: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs ``script`` with Python; it is killed at the end of the block."""
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()
