"""The part of a process that torchrun has started, as a command of flexmarl."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.torchrun.place import Place
from flexmarl.launch.torchrun.rank import as_command

from ..conftest import SOURCES
from .test_place import torchrun

HEAD = Place.of(torchrun(0, MASTER_ADDR="127.0.0.1"))
NODE = Place.of(torchrun(2))


def test_the_head_trains_and_waits_for_the_other_hosts() -> None:
    assert as_command(HEAD, ["a", "training.steps=5"]) == [
        "train", "network.listen=127.0.0.1", "a", "training.steps=5", "--name", "first", "--continue", "--nodes", "1",
    ]  # fmt: skip


def test_another_host_joins_by_the_file_in_the_run_s_folder() -> None:
    words = as_command(NODE, ["a", "--runs", "/shared", "--name", "b"])
    assert words[:3] == ["node", "--join", str(Path("/shared/b/address"))] and words[-1].endswith("-1")


def test_a_master_that_is_unknown_is_refused_by_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=no-such-host.invalid: .*--rdzv-endpoint"):
        as_command(Place.of(torchrun(0, MASTER_ADDR="no-such-host.invalid")), ["a"])


def test_a_run_without_a_lasting_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="write --name, or torchrun's --rdzv-id"):
        as_command(Place.of(torchrun(0, TORCHELASTIC_RUN_ID="none")), ["a"])


@pytest.mark.parametrize("option", [["--nodes", "2"], ["--resume", "runs/a"], ["--dry-run"]])
def test_options_that_torchrun_decides_are_refused(option: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{option[0]}: leave it out"):
        as_command(HEAD, ["a", *option])


def test_a_process_that_only_waits_imports_little() -> None:
    """Most processes of a host wait: the package with its configs would cost each of them seconds."""
    program = (
        "import sys, flexmarl.launch.torchrun.rank; print(*{'numpy', 'pydantic', 'zmq'} & {*sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
