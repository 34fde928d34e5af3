"""The command ``flexmarl node`` before it has joined a run."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from flexmarl.core.wire.curve import Keys
from flexmarl.launch.cli.node import node

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
    command = [sys.executable, "-P", "-m", "flexmarl.launch.cli.main", "node", "--again", "--join", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 2 and "its mode is 0644, open to other users" in done.stderr
    assert not done.stdout


def test_a_hangup_is_ignored_under_nohup(tmp_path: Path) -> None:
    """As in ``nohup flexmarl node ... &``, when the terminal is closed."""
    code = (
        "import asyncio, os, signal\n"
        "from pathlib import Path\n"
        "from flexmarl.launch.errors import NoRunToJoin\n"
        "from flexmarl.launch.cli import node as command\n"
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


SIGNALLED = """
import asyncio, os, signal, sys
from flexmarl.launch.cli.main import main
from flexmarl.launch.cli import node as command
from flexmarl.launch.hosts.nodes.joining import Dismissal

lives = []

async def serve(options, progress, joined):
    lives.append(1)
    assert len(lives) == 1, "a node that was asked to end waits for no further run"
    joined()
    os.kill(os.getpid(), signal.SIGTERM)
    {then}
    return Dismissal("the run has ended", failed=False)

command.serve = serve
sys.exit(main(["node", "--again", "--join", sys.argv[1]]))
"""
SOON = "await asyncio.sleep(0.2)"
AGAIN = """await asyncio.sleep(command.SAME_REQUEST_S + 0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(3600.0)"""


@pytest.mark.parametrize(
    ("then", "status", "end"), [(SOON, 0, "the node ends: the run has ended"), (AGAIN, 130, "")]
)
def test_a_node_of_a_run_stays_after_sigterm_until_it_is_dismissed_or_asked_again(
    tmp_path: Path, then: str, status: int, end: str
) -> None:
    command = [sys.executable, "-P", "-c", SIGNALLED.format(then=then), str(tmp_path / "address")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == status, done.stdout + done.stderr
    assert "SIGTERM: the node stays until the run ends" in done.stdout and end in done.stdout


def test_a_missing_file_of_keys_is_named_at_once() -> None:
    arguments = ["--join", "tcp://127.0.0.1:9", "--key", "no-such-file"]
    with pytest.raises(click.UsageError, match="--key no-such-file: there is no such file"):
        CliRunner().invoke(node, arguments, standalone_mode=False, catch_exceptions=False)
