"""Nodes by ssh, with a script in the place of ssh."""

import os
from pathlib import Path

import pytest

from flexmarl.core.system import ActorSystem
from flexmarl.launch.hosts.nodes.hosts_file import SshHost
from flexmarl.launch.hosts.nodes.ssh import SshNodes
from flexmarl.launch.run.run_address import RunAddress


async def test_a_node_comes_as_long_as_its_ssh_runs_and_it_has_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that begins again with fewer nodes waits for these."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\ncase "$*" in *gone*) exit 3;; esac\nread line < "$0.end"\n')
    ssh.chmod(0o700)
    os.mkfifo(tmp_path / "ssh.end")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    hosts = tuple(SshHost(name, name, None, "python", "line 1") for name in ("late", "there", "gone"))
    async with ActorSystem("tests") as system:
        nodes = SshNodes(hosts, RunAddress.of(system), tmp_path)
        await nodes.start()
        assert await nodes._processes[hosts[2]].wait() == 3
        assert nodes.coming(["there"]) == ["late"]
        for process in nodes._processes.values():
            if process.returncode is None:
                process.kill()
        await nodes.close()
        assert nodes.coming([]) == []
