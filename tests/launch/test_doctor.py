"""``flexmarl doctor``, with and without devices."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexmarl.launch import doctor as module
from flexmarl.launch.commands import cli
from flexmarl.launch.doctor import diagnose, doctor
from flexmarl.transport.devices.nvidia import NvidiaDevice, NvidiaDevices

DEVICES = NvidiaDevices((NvidiaDevice("GPU-1", "H100", 80 << 30, 30 << 30, 93, ("GPU-2",), 0, (), 0),), "")


def test_it_is_a_command() -> None:
    assert cli.commands["doctor"] is doctor


def test_a_machine_without_devices_says_why() -> None:
    result = CliRunner().invoke(doctor, ["--json"], standalone_mode=False)
    found = json.loads(result.output)
    assert found["machine"]["cpus"] >= 1 and found["memory_bytes"] > 1 << 20
    assert found["nvidia"]["devices"] or found["nvidia"]["reason"]
    assert result.return_value == (1 if found["problems"] else 0)
    assert "shared memory" in CliRunner().invoke(doctor, []).output


def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_devices", lambda: DEVICES)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(doctor, []).output
    assert "H100: 30.0 of 80.0 GiB free, 93 % busy, reads GPU-2" in shown


def test_too_little_memory_is_a_problem_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(directory: Path) -> int:
        return 64 << 20

    monkeypatch.setattr(module, "free_bytes", free)
    monkeypatch.setattr(module, "read_devices", lambda: DEVICES)
    monkeypatch.setattr("resource.getrlimit", lambda limit: (8 << 20, 8 << 20))
    shared, pinned = diagnose().problems
    assert "has 64 MiB free" in shared and "FLEXMARL_RUNTIME_BASE" in shared
    assert "may pin 8 MiB" in pinned
    assert CliRunner().invoke(doctor, [], standalone_mode=False).return_value == 1
