"""Nodes that are started by ssh: a real sshd of this host, with its own port and keys."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..conftest import SIMULATED, SOURCES, Launcher, wait_until

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")

pytestmark = pytest.mark.skipif(
    SSHD is None or os.geteuid() != 0,
    reason="there is no sshd (Debian: openssh-server), or no root to start it",
)


@dataclass
class Sshd:
    """``ssh``: a folder with a program ssh that knows the keys. ``python``: one that imports this flexmarl."""

    port: int
    ssh: Path
    python: Path

    def line(self, name: str, **options: object) -> str:
        found = {"port": self.port, "python": self.python, **options}
        words = [name, "127.0.0.1", *(f"{key}={value}" for key, value in found.items())]
        return " ".join(words) + "\n"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = [
        f"HostKey={folder / 'host'}", f"AuthorizedKeysFile={folder / 'authorized'}", "StrictModes=no", "UsePAM=no",
        "PasswordAuthentication=no", "PermitRootLogin=yes", "PidFile=none", "ListenAddress=127.0.0.1",
    ]  # fmt: skip
    words = [word for option in options for word in ("-o", option)]
    assert SSHD is not None
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", "/dev/null", "-p", str(port), *words])
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    _program(
        bin_folder / "ssh",
        f"exec /usr/bin/ssh -F none -i {folder / 'user'} -o StrictHostKeyChecking=no "
        f'-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"',
    )
    _program(folder / "python", f'PYTHONPATH={SOURCES} OMP_NUM_THREADS=1 exec {sys.executable} "$@"')
    try:
        wait_until(lambda: server.poll() is not None or _listens(port), "sshd listens")
        words = [str(bin_folder / "ssh"), "-p", str(port), "127.0.0.1", "true"]
        trial = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if trial.returncode:
            pytest.skip(f"sshd does not let its own user in: {trial.stderr}")
        yield Sshd(port, bin_folder, folder / "python")
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.fixture
def path_of_ssh(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{sshd.ssh}:{os.environ['PATH']}")


@pytest.mark.usefixtures("path_of_ssh")
def test_nodes_are_started_and_end_with_the_run(launcher: Launcher, sshd: Sshd, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(sshd.line("left") + sshd.line("right"))
    run = launcher.train(
        "ssh", *SIMULATED, "agents.solver.instances=3", "training.steps=1000000", "network.listen=127.0.0.1",
        "--hosts", str(hosts),
    )  # fmt: skip
    run.wait_for_step(2)
    for name in ("left", "right"):
        log = (run.directory / "logs" / f"node-{name}.log").read_text()
        assert f"node {name} has joined the run" in log
    assert any(" -P -m flexmarl.launch.cli node" in command for command in _commands()), (
        "no file there is imported"
    )
    secret = (run.directory / "address").read_text().split('"server_secret": "')[1][:40]
    assert not any(secret in command for command in _commands()), "other users see command lines"
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    wait_until(lambda: not any("launch.cli node" in command for command in _commands()), "the nodes are gone")
    assert "the node ends: the run has ended" in (run.directory / "logs" / "node-left.log").read_text()
    run.assert_nothing_is_left()


@pytest.mark.usefixtures("path_of_ssh")
def test_hosts_that_fail_are_named_with_their_lines(launcher: Launcher, sshd: Sshd, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(
        sshd.line("closed", port=1)
        + sshd.line("bare", python=shutil.which("python3", path="/usr/bin") or "/nowhere")
        + sshd.line("missing", python="/nowhere/python")
    )
    run = launcher.train("failing", *SIMULATED, "network.listen=127.0.0.1", "--hosts", str(hosts))
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
