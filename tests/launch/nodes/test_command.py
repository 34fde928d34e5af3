"""The command ``flexmarl node`` before it has joined a run."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from flexmarl.core.wire.curve import Keys
from flexmarl.launch.nodes.command import node

from ...patience import PATIENCE_S


@pytest.mark.parametrize("join", [["-"], ["tcp://10.0.0.1:4711", "--key", "address"]])
def test_a_node_waits_for_the_next_run_only_at_a_file(join: list[str]) -> None:
    with pytest.raises(click.UsageError, match="--again needs --join FILE"):
        CliRunner().invoke(node, ["--again", "--join", *join], standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize("name", ["a b/c", "a\x1b[2J", "\u202eb"])
def test_a_name_is_checked_before_anything_else(name: str) -> None:
    with pytest.raises(click.UsageError, match="--name: invalid name .*: use 1 to 64 letters"):
        CliRunner().invoke(
            node, ["--join", "none", "--name", name], standalone_mode=False, catch_exceptions=False
        )


def test_a_file_that_others_may_read_is_refused_and_not_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text(f"tcp://127.0.0.1:9\n{Keys.make().to_json()}")
    file.chmod(0o644)
    command = [sys.executable, "-P", "-m", "flexmarl.launch.cli", "node", "--again", "--join", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 2 and "its mode is 0644, open to other users" in done.stderr
    assert not done.stdout


def test_a_hangup_is_ignored_under_nohup(tmp_path: Path) -> None:
    """As in ``nohup flexmarl node ... &``, when the terminal is closed."""
    code = (
        "import asyncio, os, signal\n"
        "from pathlib import Path\n"
        "from flexmarl.launch.errors import NoRunToJoin\n"
        "from flexmarl.launch.nodes import command\n"
        "def find():\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    raise FileNotFoundError('address')\n"
        "try:\n"
        "    asyncio.run(command._until_signal(command.NodeOptions(find, '', '', 1.0)))\n"
        "except NoRunToJoin as error:\n"
        "    print(error)\n"
    )
    command = ["nohup", sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
    )
    assert "no run was found within 1 s" in done.stdout, done.stderr
