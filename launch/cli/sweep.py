"""The command ``flexmarl sweep``: runs of one recipe that differ in a few settings, one after the other."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from ..errors import RunDirectoryError
from ..monitoring.console.echo import echo
from ..run.prepared_run import DEFAULT_RECIPE, begun_run, default_name, recipe_and_settings, resolve_given
from ..sweep.grid import SweptRun, runs_of
from .options import runs_option

_STOPPED = 130
_COMMAND = (sys.executable, "-P", "-m", "flexmarl.launch.cli.main")


@click.command()
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY.KEY=VALUE,VALUE,...]...")
@click.option("--name", help="The begin of the runs' names. Default: recipe and time.")
@runs_option
@click.option(
    "--slurm",
    metavar="OPTIONS",
    help="Submit each run as a job, by `flexmarl slurm` with these options, instead of training it here.",
)
@click.option("--dry-run", is_flag=True, help="Print the runs and their settings, and stop.")
def sweep(words: tuple[str, ...], name: str | None, runs: Path, slurm: str | None, dry_run: bool) -> int:
    """Train a recipe once for each combination of some settings' values, one run after the other, and compare the runs.

    All configs are checked before the first run. A run that fails does not stop the others. The same command with
    --name continues a sweep that was stopped: complete runs are left as they are.

    \b
    Examples:
      flexmarl sweep sort-digits seed=0,1,2
      flexmarl sweep path/to/recipe seed=0,1,2 agent_defaults.optimizer.lr=1e-5,3e-5 --name lr
      flexmarl sweep path/to/recipe seed=0,1,2 --name lr --slurm="--nodes 1 --gpus-per-node 8 --time 04:00:00"
      flexmarl sweep sort-digits training.steps=20,40 --dry-run

    Ctrl-C stops the run under way, which saves a checkpoint, and the sweep.
    """
    recipe_argument, settings = recipe_and_settings(words)
    recipe = recipe_argument or DEFAULT_RECIPE
    config, _ = resolve_given(recipe, [])
    swept = runs_of(name or default_name(config), settings)
    for run in swept:
        resolve_given(recipe, run.settings)
        begun_run(runs, run.name, recipe)
    if dry_run:
        for run in swept:
            echo(f"{runs / run.name}\n  {' '.join(run.settings)}")
        return 0
    if slurm is not None:
        return max(_call("slurm", recipe, run, runs, shlex.split(slurm)) for run in swept)
    return _train_all(recipe, swept, runs)


def _train_all(recipe: str, swept: Sequence[SweptRun], runs: Path) -> int:
    """The greatest status of the runs; 130 if one was stopped, behind which none begins."""
    worst = 0
    for number, run in enumerate(swept, 1):
        if _is_done(runs / run.name):
            echo(f"run {number} of {len(swept)}: {run.name} is complete")
            continue
        echo(f"run {number} of {len(swept)}: {run.name}", err=True)
        status = _call("train", recipe, run, runs, ["--continue"])
        worst = max(worst, status)
        if status == _STOPPED:
            echo("the sweep is stopped: the same command with --name continues it", err=True)
            break
    begun = [str(runs / run.name) for run in swept if (runs / run.name).exists()]
    if len(begun) > 1:
        subprocess.run([*_COMMAND, "runs", "compare", *begun], check=False)
    return worst


def _call(command: str, recipe: str, run: SweptRun, runs: Path, options: Sequence[str]) -> int:
    """The status of ``flexmarl COMMAND`` for the run: a process of its own, whose memory and devices are free at its
    end."""
    words = [command, recipe, *run.settings, "--name", run.name, "--runs", str(runs), *options]
    with subprocess.Popen([*_COMMAND, *words]) as process, _leaving_stops_to(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _leaving_stops_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within it a signal to stop is for the process, which saves a checkpoint then."""

    def leave(_number: int, _frame: object) -> None:
        """Ctrl-C reaches the process from the terminal: sent on, it would be a second one, which stops at once."""

    def send_on(number: int, _frame: object) -> None:
        process.send_signal(number)

    # Functions, not SIG_IGN: a new process would inherit that.
    before = {
        number: signal.signal(number, how)
        for number, how in ((signal.SIGINT, leave), (signal.SIGTERM, send_on))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_done(folder: Path) -> bool:
    # Imported here: the report's reader takes a tenth of a second.
    from ..run_folder.stored_run import read_run

    try:
        return read_run(folder).state == "done"
    except RunDirectoryError:
        return False
