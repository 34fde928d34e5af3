"""``scripts/bench/run``: its commands are the files of its folder, and those of ``flexmarl bench``."""

import os
import re
import subprocess
from pathlib import Path

import click
import pytest

from flexmarl.launch.bench import machine
from flexmarl.launch.cli.bench import bench
from scripts.bench.commands import FOLDER, main, run

from ...patience import PATIENCE_S

TESTS = Path(__file__).parents[2]
NAMES = run.list_commands(click.Context(run))


def test_every_file_with_a_command_is_listed() -> None:
    files = {path.stem for path in FOLDER.glob("*.py") if "\n@click." in path.read_text()}
    assert {*files, *bench.commands} == {*NAMES, "commands"}


@pytest.mark.parametrize("name", NAMES)
def test_a_command_has_the_name_of_its_file_and_shows_how_it_is_used(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = run.get_command(click.Context(run), name)
    assert command is not None and command.name == name
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    program = "flexmarl bench" if name in bench.commands else "scripts/bench/run"
    assert f"Usage: scripts/bench/run {name} " in text and f"\n    {program} {name}" in text


def test_every_table_is_drawn_from_a_measured_result() -> None:
    """A table that asks for a key which its measurement lacks would fail after minutes of measuring."""
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    shown = [
        (path.stem, name)
        for folder in (FOLDER, Path(machine.__file__).parent)
        for path in sorted(folder.glob("*.py"))
        for name in re.findall(
            r"^def (\w+)\(console: Console, result: Mapping", path.read_text(), re.MULTILINE
        )
        if name != "warn_if_busy"
    ]
    undrawn = [
        f"{module}.{name}"
        for module, name in shown
        if not any(
            f"drawn({module}.{name}, " in text
            or (
                re.search(rf"^from [\w.]+\.bench\.{module} import .*\b{name}\b", text, re.MULTILINE)
                and f"drawn({name}, " in text
            )
            for text in texts
        )
    ]
    assert len(shown) > 15 and not undrawn


def test_the_help_lists_every_command_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^  (\w+) +[A-Z]\w+ ", text.partition("Commands:")[2], re.MULTILINE)
    assert listed == NAMES


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balanc"]) == 2
    assert "No such command 'balanc'" in capsys.readouterr().err


def test_the_program_works_in_any_folder(program: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [program, "store", "--quick", "--json", "--rounds=0"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "0 is not in the range" in ended.stderr
