"""A real sshd of this host, with its own port and keys."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ...conftest import SOURCES, wait_until

# sshd wants a folder in /run. If its service has not made it, sshd has a /run of its own: the machine's stays as it is.
_WITH_FOLDER = [
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd && exec "$@"',
    "sh",
]


def missing() -> str | None:
    """The reason why this process can't start an sshd; None if it can."""
    if os.geteuid() != 0:
        return "it needs root"
    for program, package in (("sshd", "openssh-server"), ("ssh", "openssh-client")):
        if shutil.which(program) is None:
            return f"there is no program {program} (Debian: apt-get install {package})"
    return None


needs_sshd = pytest.mark.skipif(missing() is not None, reason=f"no sshd: {missing()}")


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


@contextmanager
def running_sshd(folder: Path) -> Iterator[Sshd]:
    """``folder``: an empty one, for its files."""
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = [
        f"HostKey={folder / 'host'}", f"AuthorizedKeysFile={folder / 'authorized'}", "StrictModes=no", "UsePAM=no",
        "PasswordAuthentication=no", "PermitRootLogin=yes", "PidFile=none", "ListenAddress=127.0.0.1",
    ]  # fmt: skip
    words = [word for option in options for word in ("-o", option)]
    sshd, ssh = shutil.which("sshd"), shutil.which("ssh")
    assert sshd is not None and ssh is not None
    inside = [] if Path("/run/sshd").is_dir() else _WITH_FOLDER
    server = subprocess.Popen([*inside, sshd, "-D", "-e", "-f", "/dev/null", "-p", str(port), *words])
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    _program(
        bin_folder / "ssh",
        f"exec {ssh} -F none -i {folder / 'user'} -o StrictHostKeyChecking=no "
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
