"""The commands ``flexmarl runs list``, ``compare`` and ``rm``."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..monitoring.console.echo import echo, echo_json
from ..run_folder.run_directory import RunDirectory
from .options import FilePath

if TYPE_CHECKING:
    from ..run_folder.compare import SeedComparison

_FOLDER = FilePath(file_okay=False)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")


@click.group()
def runs() -> None:
    """List, compare and remove runs.

    \b
    Examples:
      flexmarl runs list
      flexmarl runs compare runs/first runs/second
      flexmarl runs rm runs/first
    """


@runs.command("list")
@click.option(
    "--runs", "folder", type=_FOLDER, default=Path("runs"), show_default=True, help="The folder of all runs."
)
@_as_json
def list_runs(folder: Path, as_json: bool) -> int:
    """List the runs of a folder, the newest first.

    Shown: recipe, state, complete steps, metrics of the last evaluation, age, size of all files. The state is running,
    done, stopped (by a signal), failed, killed (the run had no time to write why it ended) or not started.

    \b
    Examples:
      flexmarl runs list
      flexmarl runs list --runs /data/runs --json
    """
    from ..run_folder import (  # imported here: the report's reader takes a tenth of a second
        stored_run,
        tables,
    )

    listed_runs = stored_run.read_runs(folder)
    if as_json:
        echo_json({"runs": [_plain(run) for run in listed_runs]})
    elif listed_runs:
        tables.show_list(listed_runs)
    else:
        echo(f"there are no runs in {folder}")
    return 0


@runs.command()
@click.argument("run_dirs", nargs=-1, required=True, type=_FOLDER, metavar="RUN_DIR RUN_DIR...")
@_as_json
def compare(run_dirs: Sequence[Path], as_json: bool) -> int:
    """Show two or more runs side by side: the keys of their configs that differ, and their final figures.

    Runs that differ in their seeds alone are one column: the mean of each figure, its range and the number of runs.
    Figures: state, steps, wall time, the last evaluation, and the mean reward of each agent over the last twentieth of
    the steps.

    \b
    Examples:
      flexmarl runs compare runs/first runs/second
      flexmarl runs compare runs/lr-* --json
    """
    if len(run_dirs) < 2:
        raise click.UsageError("compare takes two or more runs")
    from ..run_folder import compare as comparing
    from ..run_folder import stored_run, tables

    compared_runs = [stored_run.read_run(path) for path in run_dirs]
    if as_json:
        comparison = comparing.compare(compared_runs)
        config = {
            key: [None if value is comparing.MISSING else value for value in row]
            for key, row in comparison.config.items()
        }
        names = [str(run.path) for run in compared_runs]
        compared = {"runs": names, "config": config, "figures": comparison.figures}
        seeds = comparing.compare_seeds(compared_runs)
        echo_json(compared if seeds is None else {**compared, "seeds": _plain_seeds(seeds)})
    else:
        tables.show_comparison(compared_runs)
    return 0


@runs.command()
@click.argument("run_dirs", nargs=-1, required=True, type=_FOLDER, metavar="RUN_DIR...")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(run_dirs: Sequence[Path], yes: bool) -> int:
    """Remove runs with all their files, checkpoints too. A run that a process works on is refused.

    \b
    Examples:
      flexmarl runs rm runs/first
      flexmarl runs rm runs/trial-* --yes
    """
    from ..run_folder.run_removal import refuse_alive, remove_run

    directories = [RunDirectory.existing(path) for path in run_dirs]
    for directory in directories:
        refuse_alive(directory)
    if not yes:
        names = "\n".join(f"  {directory.path}" for directory in directories)
        click.confirm(f"Remove these runs with their checkpoints?\n{names}\n", abort=True)
    for directory in directories:
        remove_run(directory)
        echo(f"removed {directory.path}")
    return 0


def _plain_seeds(seeds: "SeedComparison") -> list[dict[str, Any]]:
    """An object for each group of runs that differ in their seeds alone."""
    return [
        {
            "runs": [str(run.path) for run in group],
            "seeds": [run.config.get("seed") for run in group],
            "figures": {
                name: dataclasses.asdict(values[place])
                for name, values in seeds.figures.items()
                if dataclasses.is_dataclass(values[place])
            },
        }
        for place, group in enumerate(seeds.groups)
    ]


def _plain(run: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(run), "path": str(run.path), "name": run.name}
