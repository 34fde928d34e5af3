"""A Slurm of two nodes on this host, with daemons, ports and files of its own."""

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ...conftest import wait_until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_CONFIG = """
ClusterName=flexmarl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
KillWait=20
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """The reason why this process can't start a Slurm; None if it can."""
    if os.geteuid() != 0:
        return "it needs root"
    if absent := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"there is no program {absent[0]} (Debian: apt-get install slurm-wlm munge)"
    return None


@contextmanager
def two_nodes(folder: Path) -> Iterator[Path]:
    """Its configuration, for ``SLURM_CONF``. ``folder``: for its files; empty, and with a short path."""
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(1024))
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, folder=folder, ports=_free_ports(3)))
    munge = [f"--{name}={folder}/{file}" for name, file in _MUNGE_FILES.items()]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config), "-N", "n1"],
        ["slurmd", "-D", "-f", str(config), "-N", "n2"],
    ]
    environment = {**os.environ, "SLURM_CONF": str(config)}

    def idle() -> bool:
        done = subprocess.run(["sinfo", "-h", "-o", "%D %t"], env=environment, capture_output=True, text=True)
        return done.stdout == "2 idle\n"

    with ExitStack() as exits:
        try:
            for command in commands:
                exits.enter_context(_daemon(command, folder))
                if command[0] == "munged":
                    wait_until((folder / "munge.socket").exists, "munged")
            wait_until(idle, "two nodes of Slurm")
        except pytest.fail.Exception:
            reason = (folder / "daemons.log").read_text(errors="replace")[-2000:]
            pytest.skip(f"Slurm does not work on this host: {reason}")
        yield config


_MUNGE_FILES = {
    "socket": "munge.socket",
    "pid-file": "munged.pid",
    "log-file": "munged.log",
    "seed-file": "munged.seed",
}


@contextmanager
def _daemon(command: list[str], folder: Path) -> Iterator[None]:
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as exits:
        probes = [exits.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
