"""The command ``flexmarl``. Each of its commands is a file of this folder and a name in ``_COMMANDS``."""

import importlib
from collections.abc import Sequence

import click

from ...core.base.collector import importing
from .exit_status import exit_status

# Each command NAME is the function NAME of the module NAME in this folder.
_COMMANDS = (
    "admit", "bench", "calibrate", "completion", "credit", "doctor", "eval", "export", "logs", "new", "node", "page",
    "plan", "report", "runs", "samples", "serve", "simulate", "slurm", "status", "stop", "store", "submit", "sweep",
    "top", "trace", "train",
)  # fmt: skip


class _Commands(click.Group):
    """Imports a command when it is used: few of them need the whole package."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        with importing():
            command: click.Command = getattr(importlib.import_module(f".{cmd_name}", __package__), cmd_name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="flexmarl")
def cli() -> None:
    """Trains several LLM agents together with reinforcement learning.

    \b
    Examples:
      flexmarl train                               the built-in recipe, in about a minute
      flexmarl train path/to/recipe --dry-run      check a recipe of your own
      flexmarl train path/to/recipe --name first   train it
      flexmarl report runs/first                   its report, also while it runs
      flexmarl samples runs/first                  its newest trajectories, turn by turn
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the process's exit status: 0 done, 1 failed, 2 refused, 130 stopped."""
    return exit_status(lambda: invoke(arguments))


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its status. Raises its errors, and click's."""
    return int(cli.main(arguments, prog_name="flexmarl", standalone_mode=False) or 0)
