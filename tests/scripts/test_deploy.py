"""scripts/deploy: images, units and the rotation of logs, checked without Docker and Apptainer."""

import grp
import gzip
import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest

from flexmarl.launch.cli.registry import cli

from ..patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts" / "deploy"
RECIPE = (DEPLOY / "flexmarl.def").read_text()
UNITS = sorted(DEPLOY.glob("*.service"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# As /etc/flexmarl/NAME.env may have them.
VARIABLES = {
    "RECIPE": "sort-digits",
    "WORDS": "training.steps=50 --restarts 3",
    "ADDRESS": "/shared/runs/first/address",
    "LISTEN": "127.0.0.1:8000",
}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their text, without comments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def texts(instruction: str) -> list[str]:
    return [text for name, text in instructions() if name == instruction]


def copies() -> dict[str, str]:
    """The targets of the files and folders that the Dockerfile copies, by source."""
    targets = {}
    for text in texts("COPY"):
        *sources, target = text.split()
        for source in sources:
            targets[source] = str(Path(target, Path(source).name)) if target.endswith("/") else target
    return targets


def part(name: str) -> str:
    """A part of Apptainer's recipe."""
    match = re.search(rf"^%{name}\n((?:    .*\n)+)", RECIPE, re.MULTILINE)
    assert match is not None, name
    return match[1]


# --------------------------------------------------------------------------- images


def test_the_image_is_of_a_tested_python_and_has_no_pins_of_its_own() -> None:
    arguments = dict(text.split("=", 1) for text in texts("ARG"))
    assert texts("FROM") == ["python:${PYTHON}-slim-bookworm"], "a tag, and not the newest"
    assert f"Programming Language :: Python :: {arguments['PYTHON']}" in PROJECT["classifiers"]
    assert set(arguments["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "scripts/constraints.txt" in copies(), "the versions, which scripts/lib.sh reads"
    for file in ("Dockerfile", "flexmarl.def"):
        commands = re.sub(r"^\s*#.*\n", "", (DEPLOY / file).read_text(), flags=re.MULTILINE)
        assert "==" not in commands and "pip" not in commands, file


def test_it_runs_as_a_user_and_shows_the_host_unless_it_gets_another_command() -> None:
    names = [name for name, _ in instructions()]
    assert texts("USER") == ["flexmarl"] and "useradd" in texts("RUN")[-1]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :], "all of it is root's, whom no run can change"
    words = [*json.loads(texts("ENTRYPOINT")[0]), *json.loads(texts("CMD")[0])]
    assert words == ["flexmarl", "doctor"]
    assert set(names) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "ENTRYPOINT", "CMD"}


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert lines.index("*") < lines.index(f"!{kept[0]}"), "nothing but these"
    for source in copies():
        assert (ROOT / source).exists(), source
        assert any(source == name or source.startswith(f"{name}/") for name in kept), source
        assert not any(fnmatch(source, line) for line in lines if line.startswith("**")), source


def test_the_commands_of_the_image_exist(tmp_path: Path) -> None:
    commands = [command for text in texts("RUN") for command in text.split(" && ")]
    programs = {re.sub(r"^(\w+=\S+ )*", "", command.strip()).split()[0] for command in commands}
    assert programs == {"bash", ".venv/bin/python", "rm", "useradd"}
    [script] = re.findall(r"bash -c '([^']+)'", commands[0])
    assert script == 'source scripts/lib.sh; install "$1"'
    _copy(tmp_path)
    source = "source scripts/lib.sh && declare -F install && _has_gpu && echo $constraints"
    environment = {"PATH": os.environ["PATH"], "FLEXMARL_GPU": "1"}
    done = subprocess.run(
        ["bash", "-c", source], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["install", f"{tmp_path}/scripts/constraints.txt"]


def test_the_copied_files_suffice(tmp_path: Path) -> None:
    _copy(tmp_path)
    words = [*json.loads(texts("ENTRYPOINT")[0]), *json.loads(texts("CMD")[0])]
    program = "import flexmarl, sys; from flexmarl.launch.cli.main import main\n"
    program += "print(flexmarl.__file__); sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *words[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "scripts" / "src"), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path)) and "shared memory" in done.stdout
    assert tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["readme"] == "README.md"


def _copy(folder: Path) -> None:
    """Copies what the image gets to ``folder``, its /opt/flexmarl."""
    for source, target in copies().items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, folder / target, symlinks=True, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, folder / target)


def test_apptainer_gets_the_same_image() -> None:
    [base] = re.findall(r"^From: (.+)$", RECIPE, re.MULTILINE)
    assert [base.replace("{{ PYTHON }}", "${PYTHON}")] == texts("FROM")
    assert part("arguments").split() == texts("ARG")
    files = dict(line.split() for line in part("files").splitlines())
    assert files == {source: f"/opt/flexmarl/{target}" for source, target in copies().items()}
    [workdir, *_] = texts("WORKDIR")
    commands = [command.strip() for command in texts("RUN")[0].split(" && ")]
    wanted = [f"cd {workdir}", *commands]
    same = part("post").replace("{{ GPU }}", "$GPU").replace("{{ EXTRAS }}", "$EXTRAS")
    assert [line.strip() for line in same.splitlines()] == [*wanted, f"chmod --recursive a+rX {workdir}"]
    path = f"{workdir}/.venv/bin"
    assert texts("ENV") == [f"PATH={path}:$PATH"] and f"PATH={path}:$PATH" in part("environment")
    assert part("test").split() == [f"{path}/flexmarl", "doctor"]


@pytest.mark.parametrize(("arguments", "printed"), [([], "doctor"), (["train", "a b"], "train|a b")])
def test_apptainers_script_passes_its_arguments(arguments: list[str], printed: str, tmp_path: Path) -> None:
    program = tmp_path / "flexmarl"
    program.write_text('#!/bin/sh\nIFS="|"; echo "$*"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", part("runscript"), "runscript", *arguments],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == printed


# --------------------------------------------------------------------------- units and logs


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_of_a_unit_exists(unit: Path) -> None:
    [command] = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
    for name in re.findall(r"\$\{?(\w+)", command):
        command = re.sub(rf"\$\{{?{name}\b\}}?", VARIABLES[name], command)
    program, name, *words = shlex.split(command.replace("%i", "first"))
    assert program == "/opt/flexmarl/.venv/bin/flexmarl"
    chosen = cli.get_command(click.Context(cli), name)
    assert chosen is not None
    context = chosen.make_context(name, words, parent=click.Context(cli))
    assert "first" in str(context.params)
    assert f"flexmarl-{name}@" in unit.name


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    text = unit.read_text().replace("/opt/flexmarl/.venv/bin/flexmarl", "/bin/true")  # it must exist
    file = tmp_path / unit.name.replace("@", "@first")
    file.write_text(text.replace("User=flexmarl", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, timeout=PATIENCE_S
    )
    # It warns of a wrong key, and ends with 0 all the same. It warns of this machine's own units too.
    assert done.returncode == 0 and str(file) not in done.stderr, done.stderr


def test_logs_of_units_are_rotated_without_a_restart() -> None:
    text = (DEPLOY / "flexmarl.logrotate").read_text()
    [patterns] = re.findall(r"^(/.+) \{$", text, re.MULTILINE)
    written = "".join(unit.read_text() for unit in UNITS)
    for pattern in patterns.split():
        folder, _, rest = pattern.partition("/*/")
        assert f"--runs {folder}" in written and rest == "logs/*.log"
    assert "copytruncate" in text, "actors keep their files open"


def test_logrotate_empties_a_log_that_stays_open(tmp_path: Path) -> None:
    if shutil.which("logrotate") is None:
        pytest.skip("no logrotate here")
    log = tmp_path / "runs" / "first" / "logs" / "store.log"
    log.parent.mkdir(parents=True)
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    text = (DEPLOY / "flexmarl.logrotate").read_text().replace("su flexmarl flexmarl", f"su {user} {group}")
    file = tmp_path / "flexmarl"
    file.write_text(text.replace("/var/lib/flexmarl", str(tmp_path)))
    file.chmod(0o644)
    with log.open("ab") as opened:
        opened.write(b"before\n")
        opened.flush()
        done = subprocess.run(
            ["logrotate", "--verbose", "--force", "--state", tmp_path / "state", file],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0 and "error" not in done.stderr, done.stderr
        opened.write(b"after\n")
    assert log.read_bytes() == b"after\n"
    assert gzip.decompress(log.with_name("store.log.1.gz").read_bytes()) == b"before\n"
