"""Runs that benches start, as forks of the process that has imported torch (``warm_process.py``), without the checks
before a start, whose process takes as long."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from ...launch.conftest import UNCHECKED
from ...patience import PATIENCE_S
from ...processes import SOURCES
from ...warm_process import TEMPLATE, WarmProcess

MAIN = f"{UNCHECKED}\nimport sys; from flexmarl.launch.cli.main import main; sys.exit(main())"


def start(arguments: Sequence[str], output: IO[Any]) -> "WarmProcess | subprocess.Popen[bytes]":
    """A command of flexmarl; a new interpreter if the forks of this session have another environment."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    return TEMPLATE.start(MAIN, arguments, environment, output.fileno()) or subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
    )  # fmt: skip


def run(arguments: Sequence[str]) -> None:
    """Waits for the end of a command, which has to be a good one."""
    with tempfile.TemporaryFile("w+") as output:
        status = start(arguments, output).wait(PATIENCE_S)
        output.seek(0)
        assert status == 0, output.read()
