"""The command ``flexmarl eval``."""

from pathlib import Path

import click

from ...core.telemetry import LOG_LEVELS, LogLevel
from ..config.evaluation_config import evaluation_config
from ..errors import LostActor
from ..monitoring.console.output import Form, Output
from ..run.prepared_run import new_run
from .exit_status import EXIT_FAILED
from .options import FilePath
from .run_and_report import RunOptions, run_prepared


@click.command()
@click.argument("source", type=FilePath())
@click.argument("settings", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option(
    "--recipe", help="The recipe whose queries are taken. Default: the run's, with the run's settings."
)
@click.option(
    "--repeats", type=click.IntRange(1), metavar="K", help="Trajectories of each query: gives pass@k."
)
@click.option("--name", help="The evaluation's name. Default: recipe and time.")
@click.option(
    "--runs",
    type=FilePath(),
    default=Path("runs"),
    show_default=True,
    help="The folder of all runs, in which the evaluation is one too.",
)
@click.option("-q", "--quiet", "form", flag_value="quiet", help="Print warnings and the result alone.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object per event, and nothing else.")
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="As of train."
)
def eval(  # noqa: A001  # the function has the command's name
    source: Path,
    settings: tuple[str, ...],
    recipe: str | None,
    repeats: int | None,
    name: str | None,
    runs: Path,
    form: Form | None,
    log_level: LogLevel,
) -> int:
    """Evaluate saved policies on a recipe's evaluation queries; nothing is trained.

    SOURCE is a run (its newest checkpoint), RUN/STEP for the checkpoint after that step, or the folder of a model, as
    `flexmarl export` writes it, for all trained policies of the recipe. The evaluation is a run without steps: its
    trajectories are shown by `flexmarl samples`, its figures by `flexmarl runs`.

    \b
    Examples:
      flexmarl eval runs/first
      flexmarl eval runs/first/120 --repeats 8 evaluation.temperature=0.7
      flexmarl eval runs/first data.eval_problems=1000 --name on-1000
      flexmarl eval runs/first --recipe path/to/harder-recipe
      flexmarl eval models/sorter --recipe sort-digits --json | jq 'select(.event == "evaluated")'
    """
    config = evaluation_config(source, recipe, [*settings], repeats)
    options = RunOptions(Output.standard(form or "normal"), log_level)
    with new_run(config, (), runs, name, options.output.note) as prepared:
        try:
            return run_prepared(prepared, options)
        except LostActor:  # already reported
            return EXIT_FAILED
