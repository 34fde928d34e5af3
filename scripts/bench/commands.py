"""The command ``scripts/bench/run``. Each of its commands is a file of this folder, or one of ``flexmarl bench``."""

import ast
import importlib
from collections.abc import Sequence
from pathlib import Path

import click

from flexmarl.core.base.collector import importing
from flexmarl.launch.cli.bench import bench
from flexmarl.launch.cli.exit_status import exit_status

FOLDER = Path(__file__).parent
# Each command NAME is the function NAME of the module NAME in this folder.
BENCHMARKS = (
    "balance", "chats", "gateway", "kill_storm", "memory", "merge", "page", "paper", "pipeline", "pool", "race_trl",
    "relays", "replicas", "rollout", "router", "routes", "samples", "slots", "stalls", "start", "store",
    "store_storm", "swap", "trace", "truth", "updates",
)  # fmt: skip


class _Commands(click.Group):
    """Imports a command when it is used: most of them import torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # click's signature
        return sorted([*BENCHMARKS, *bench.commands])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHMARKS:
            return bench.commands.get(cmd_name)
        with importing():
            command: click.Command = getattr(importlib.import_module(f".{cmd_name}", __package__), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in self.list_commands(ctx)])


def _summary(name: str) -> str:
    """The first line of a command's file, which is read without importing it."""
    if name in bench.commands:
        return bench.commands[name].get_short_help_str(limit=200)
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
    return docstring.partition("\n")[0].replace("``", "")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def run() -> None:
    """Measures flexmarl beside bounds and other software, and counts samples after faults.

    calls, network and tensors are those of flexmarl bench, which needs no checkout.

    \b
    Examples:
      scripts/bench/run pool --quick
      scripts/bench/run pipeline --json > pipeline.json
      scripts/bench/run kill_storm --strikes 100 --seed 7
      scripts/bench/run swap --help
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the process's exit status: 0 done, 1 failed, 2 refused, 130 stopped."""
    return exit_status(
        lambda: int(run.main(arguments, prog_name="scripts/bench/run", standalone_mode=False) or 0)
    )
