"""``flexmarl doctor --hosts``: the answers of hosts, and the sentences about them."""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexmarl.launch.cli.doctor import doctor
from flexmarl.launch.hosts.diagnosis import Diagnosis, diagnose
from flexmarl.launch.hosts.nodes import probing
from flexmarl.launch.hosts.nodes.host_probe import MARK, ProbeAnswer, ProbeRequest
from flexmarl.launch.hosts.nodes.hosts_file import SshHost
from flexmarl.launch.hosts.nodes.probing import Probed, problems_of

from ....patience import PATIENCE_S
from ....processes import SOURCES
from .sshd import Sshd, needs_sshd

GPU1 = SshHost("gpu1", "10.0.0.2", None, "python", "hosts.txt, line 1")


@pytest.fixture(scope="module")
def here() -> Diagnosis:
    return replace(diagnose(), problems=())


def problems(
    here: Diagnosis, *, ahead_s: float = 0.0, error_s: float = 0.01, back: str = "", **answer: str
) -> list[str]:
    """The sentences about a host that is like this one, but for these answers."""
    there = replace(here, host=replace(here.host, name="gpu1"))
    found = ProbeAnswer(
        there, answer.get("not_reached", ""), answer.get("folder_problem", ""), "10.0.0.2", 4000
    )
    request = ProbeRequest("10.0.0.1", 5000, "/shared/runs", "/shared/runs/proof", "text")
    return [*problems_of(GPU1, Probed(found, back, ahead_s, error_s), request, here)]


def test_a_host_that_is_like_this_one_has_no_problem(here: Diagnosis) -> None:
    assert problems(here) == []


def test_each_difference_is_said_with_what_to_do(here: Diagnosis) -> None:
    refused = "Connection refused"
    there, back, folder, clock = problems(
        here,
        ahead_s=-3.04,
        back="timed out",
        not_reached=refused,
        folder_problem="it is another folder there",
    )
    assert there.startswith(
        "gpu1 does not reach this host at 10.0.0.1, port 5000: Connection refused; the kernel"
    )
    assert back.startswith(
        "this host does not reach gpu1 at 10.0.0.2, port 4000: timed out; the kernel chooses"
    )
    assert folder == (
        "/shared/runs, the folder of all runs, is not shared with gpu1: it is another folder there; name one by --runs "
        "that all hosts have under the same path"
    )
    assert clock.startswith("the clock of gpu1 differs by -3.0 s from this host's: set both by NTP")


def test_a_clock_that_is_measured_badly_is_not_blamed(here: Diagnosis) -> None:
    assert problems(here, ahead_s=1.4, error_s=0.5) == []
    assert len(problems(here, ahead_s=1.6, error_s=0.5)) == 1


def test_other_versions_and_problems_of_a_host_are_said(here: Diagnosis) -> None:
    other = replace(here.host, name="gpu1", packages={**here.host.packages, "torch": "1.0"})
    found = ProbeAnswer(replace(here, host=other, problems=("it is full",)), "", "", "10.0.0.2", 4000)
    request = ProbeRequest("10.0.0.1", 5000, "/shared/runs", "", "")
    own, versions = problems_of(GPU1, Probed(found, "", 0.0, 0.0), request, here)
    assert own == "gpu1: it is full"
    assert "torch must have one version on all hosts" in versions and "1.0 on gpu1" in versions
    assert versions.endswith("install the same, or name another python in hosts.txt, line 1")


def test_another_user_is_said(here: Diagnosis) -> None:
    found = ProbeAnswer(replace(here, user="guest (65534)"), "", "", "10.0.0.2", 4000)
    request = ProbeRequest("10.0.0.1", 5000, "/shared/runs", "", "")
    (said,) = problems_of(GPU1, Probed(found, "", 0.0, 0.0), request, here)
    assert "gpu1 is reached as the user guest (65534)" in said and here.user in said
    assert said.endswith("name that one in hosts.txt, line 1, as user@address")


async def test_hundreds_of_hosts_are_asked_and_only_32_at_once(
    here: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them connects to this host: a socket that accepts nothing would have room for 129."""
    asked, most, count = 0, 0, 300

    async def ask(host: SshHost, request: ProbeRequest) -> Probed | str:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(request.address, request.port)
            assert await reader.read() == b"", "it was accepted"
            writer.close()
        asked -= 1
        return Probed(ProbeAnswer(here, "", "", "127.0.0.1", 1), "", 0.0, 0.0)

    monkeypatch.setattr(probing, "_ask", ask)
    monkeypatch.setattr(probing, "own_address", lambda: "127.0.0.1")
    found = await probing.probe([replace(GPU1, name=f"gpu{n}") for n in range(count)], here)
    assert [finding.name for finding in found] == [f"gpu{n}" for n in range(count)]
    assert most == 32 and not any(finding.problems for finding in found)


@needs_sshd
@pytest.mark.usefixtures("path_of_ssh")
def test_hosts_are_asked_by_ssh_and_those_that_can_not_be_are_named(sshd: Sshd, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    bare = shutil.which("python3", path="/usr/bin") or "/nowhere"
    hosts.write_text(sshd.line("good") + sshd.line("closed", port=1) + sshd.line("bare", python=bare))
    words = ["--json", "--runs", str(tmp_path), "--hosts", str(hosts)]
    result = CliRunner().invoke(doctor, words, standalone_mode=False, catch_exceptions=False)
    assert result.return_value == 1
    good, closed, bare_python = json.loads(result.output)["hosts"]
    assert (
        good["diagnosis"]["host"]["packages"]
        and good["problems"] == json.loads(result.output)["here"]["problems"]
    )
    assert abs(good["clock_ahead_s"]) <= good["clock_error_s"] + 0.01
    (problem,) = closed["problems"]
    assert problem.startswith(
        f"{hosts}, line 2: closed (127.0.0.1) can't be asked: ssh ended with status 255"
    )
    assert "Connection refused" in problem
    (problem,) = bare_python["problems"]
    assert "can't be asked: ssh ended with status" in problem
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.txt"]


def test_the_far_side_says_what_it_does_not_reach(tmp_path: Path) -> None:
    request = ProbeRequest("127.0.0.1", 1, str(tmp_path), str(tmp_path / "proof"), "text")
    command = [sys.executable, "-P", "-m", "flexmarl.launch.hosts.nodes.host_probe"]
    lines = f"{json.dumps(asdict(request))}\ntime\n"
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        env={"PYTHONPATH": str(SOURCES), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    answer, clock = (line.removeprefix(MARK) for line in done.stdout.splitlines())
    found = json.loads(answer)
    assert found["not_reached"] == "Connection refused" and found["address"] == "127.0.0.1" and found["port"]
    assert "No such file" in found["folder_problem"]
    assert float(clock) > 0
