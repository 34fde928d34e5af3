"""The commands of ``flexmarl``: each is found, and imported when it is used."""

import subprocess
import sys

import click
import pytest

from flexmarl.launch.cli.options import FilePath
from flexmarl.launch.cli.registry import cli

from ..conftest import SOURCES

CONTEXT = click.Context(cli)


@pytest.mark.parametrize("name", cli.list_commands(CONTEXT))
def test_a_command_has_its_name_and_a_help_text(name: str) -> None:
    command = cli.get_command(CONTEXT, name)
    assert command is not None and command.name == name and command.help
    assert cli.resolve_command(CONTEXT, [name, "run"]) == (name, command, ["run"])


@pytest.mark.parametrize("name", cli.list_commands(CONTEXT))
def test_a_path_that_is_given_has_a_name(name: str) -> None:
    command = cli.get_command(CONTEXT, name)
    assert command is not None
    subcommands = command.commands.values() if isinstance(command, click.Group) else ()
    for part in (command, *subcommands):
        for param in part.params:
            assert not isinstance(param.type, click.Path) or isinstance(param.type, FilePath), param.name


def test_an_unknown_one_is_refused() -> None:
    assert cli.get_command(CONTEXT, "trian") is None
    with pytest.raises(click.UsageError, match="No such command 'trian'"):
        cli.resolve_command(CONTEXT, ["trian"])


def test_the_others_are_not_imported() -> None:
    program = (
        "import sys; from flexmarl.launch.cli.main import main; main(['completion', 'bash'])\n"
        "loaded = {'numpy', 'zmq', 'rich', 'flexmarl.launch.config.run_config'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCES)}, check=True, capture_output=True
    )
