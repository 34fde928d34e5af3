"""Nodes that are started by ssh: a real sshd of this host, with its own port and keys."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from ....patience import PATIENCE_S
from ...conftest import SIMULATED, UNCHECKED, Launcher, wait_until
from .sshd import Sshd, needs_sshd

pytestmark = needs_sshd


@pytest.mark.usefixtures("path_of_ssh")
def test_nodes_are_started_and_end_with_the_run(launcher: Launcher, sshd: Sshd, tmp_path: Path) -> None:
    names = [f"{side}-{os.getpid()}" for side in ("left", "right")]  # other nodes of this machine have others
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("".join(map(sshd.line, names)))

    def nodes() -> list[str]:
        words = [f"flexmarl.launch.cli.main node --join - --name {name}" for name in names]
        return [command for command in _commands() if any(word in command for word in words)]

    run = launcher.train(
        "ssh", *SIMULATED, "agents.solver.instances=3", "training.steps=1000000", "network.listen=127.0.0.1",
        "--hosts", str(hosts),
    )  # fmt: skip
    run.wait_for_step(2)
    for name in names:
        log = (run.directory / "logs" / f"node-{name}.log").read_text()
        assert f"node {name} has joined the run" in log
    assert nodes() and all(" -P -m flexmarl.launch" in command for command in nodes()), (
        "no file there is imported"
    )
    secret = (run.directory / "address").read_text().split('"server_secret": "')[1][:40]
    assert not any(secret in command for command in _commands()), "other users see command lines"
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    wait_until(lambda: not nodes(), "the nodes are gone")
    assert "the node ends: the run has ended" in (run.directory / "logs" / f"node-{names[0]}.log").read_text()
    run.assert_nothing_is_left()


@pytest.mark.usefixtures("path_of_ssh")
def test_hosts_that_fail_are_named_with_their_lines(launcher: Launcher, sshd: Sshd, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(
        sshd.line("closed", port=1)
        + sshd.line("bare", python=shutil.which("python3", path="/usr/bin") or "/nowhere")
        + sshd.line("missing", python="/nowhere/python")
    )
    patient = (
        f"from flexmarl.launch.hosts.nodes import ssh\nssh._MORE_S = {PATIENCE_S}\n"  # it waits for all three
    )
    words = ("network.listen=127.0.0.1", "--hosts", str(hosts))
    run = launcher.train("failing", *SIMULATED, *words, prelude=UNCHECKED + patient)
    assert run.wait() == 1
    assert f"{hosts}, line 1: closed (127.0.0.1): ssh ended with status 255" in run.text
    assert "Connection refused" in run.text
    assert f"{hosts}, line 2: bare (127.0.0.1): ssh ended with status" in run.text
    assert f"{hosts}, line 3: missing (127.0.0.1): ssh ended with status 127" in run.text
    run.assert_nothing_is_left()


def _commands() -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return found
