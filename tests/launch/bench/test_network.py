"""``flexmarl bench network`` with small states: its figures mean nothing. The namespaces that it makes."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from flexmarl.launch.bench import namespaces, network
from flexmarl.launch.bench.network import GOALS, Options, measure, parts, tables

from ...bench_tables import drawn
from ...processes import process
from ..hosts.nodes.links import needs

needs_namespaces = needs(namespaces.missing())


@pytest.mark.parametrize("encrypted", [True, False])
def test_every_figure_is_there_and_possible(encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "READERS", 2)
    reported: list[str] = []
    options = Options(rounds=1, size_bytes=8 << 20, seconds=0.05, encrypted=encrypted)
    result = asyncio.run(measure(options, reported.append))
    assert reported == ["starting", "round 1 of 1"]
    assert parts(options) == len(reported)
    for key, values in result["rounds"].items():
        assert 1e-6 < result[key] < 1e6 and values == [result[key]], key
    assert 0.01 < result["delta_bytes_share"] < 0.03
    assert [goal["key"] for goal in result["goals"]] == [goal.key for goal in GOALS]
    assert ("loopback" in result["network"]) == (namespaces.missing() is not None)
    assert "between hosts, states of 8 MiB" in drawn(tables, result)
    # Other processes of this machine may have been killed.
    assert not [name for name in namespaces.remove_abandoned() if f"-{os.getpid()}-" in name]
    assert not [name for name in existing() if f"-{os.getpid()}-" in name]


def existing() -> list[str]:
    if namespaces.missing() is not None:
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line]


_LISTENER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
listener.accept()
"""


@needs_namespaces
def test_two_hosts_reach_each_other_and_leave_nothing() -> None:
    with namespaces.two_hosts() as (near, far):
        assert {near.name, far.name} <= set(existing())
        command = [*near.command, sys.executable, "-c", _LISTENER, near.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
            assert listening.stdout is not None
            port = listening.stdout.readline().strip()
            connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
            subprocess.run([*far.command, sys.executable, "-c", connect, near.address, port], check=True)
    assert not {near.name, far.name} & set(existing())


_MAKER = """
import sys
from flexmarl.launch.bench.namespaces import two_hosts
with two_hosts() as hosts:
    print(*(host.name for host in hosts), flush=True)
    sys.stdin.read()
"""


@needs_namespaces
def test_the_hosts_of_a_killed_process_are_removed_by_the_next() -> None:
    with process(_MAKER) as child:
        assert child.stdout is not None
        names = child.stdout.readline().decode().split()
        assert set(names) <= set(existing())
        with namespaces.two_hosts():  # those of a living process stay
            assert set(names) <= set(existing())
        child.send_signal(signal.SIGKILL)
    namespaces.remove_abandoned()
    assert not set(names) & set(existing())
