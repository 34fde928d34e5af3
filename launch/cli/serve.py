"""The command ``flexmarl serve``."""

from pathlib import Path

import click

from ...core.telemetry import LOG_LEVELS, LogLevel
from ..config.evaluation_config import serving_config
from ..errors import LostActor
from ..gateway.service_key import service_key
from ..monitoring.console.output import Form, Output
from ..run.prepared_run import new_run
from .exit_status import EXIT_FAILED
from .options import FilePath
from .run_and_report import RunOptions, run_prepared


@click.command()
@click.argument("source", type=FilePath())
@click.argument("settings", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option(
    "--checkpoint", type=click.IntRange(0), metavar="STEP", help="Of a run. Default: its newest checkpoint."
)
@click.option(
    "--listen",
    default="127.0.0.1:8000",
    show_default=True,
    metavar="HOST:PORT",
    help="The address, without encryption. Port 0: a free one, which is printed.",
)
@click.option(
    "--key-file",
    type=FilePath(dir_okay=False),
    help="A file with the key of requests, which its owner alone may read. Default: a new key, printed once.",
)
@click.option("--recipe", help="The recipe with the agents. Default: the run's, with the run's settings.")
@click.option("--name", help="The name of the folder with the logs. Default: recipe and time.")
@click.option("--runs", type=FilePath(), default=Path("runs"), show_default=True, help="As of train.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object per event, and nothing else.")
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="As of train."
)
def serve(
    source: Path,
    settings: tuple[str, ...],
    checkpoint: int | None,
    listen: str,
    key_file: Path | None,
    recipe: str | None,
    name: str | None,
    runs: Path,
    form: Form | None,
    log_level: LogLevel,
) -> int:
    """Serve the agents of saved policies by OpenAI's and Anthropic's APIs; nothing is trained.

    SOURCE is a run, or the folder of a model, as `flexmarl export` writes it, for all trained policies of the recipe.
    A request's `model` names the agent. Ctrl-C ends it.

    \b
    Examples:
      flexmarl serve runs/first
      flexmarl serve runs/first --checkpoint 120 --listen 127.0.0.1:0
      flexmarl serve models/sorter --recipe sort-digits --key-file ~/.config/sorter.key
    """
    place = source if checkpoint is None else source / str(checkpoint)
    config = serving_config(place, recipe, [*settings], listen, key_file and key_file.resolve())
    options = RunOptions(Output.standard(form or "normal"), log_level)
    with new_run(config, (), runs, name, options.output.note) as prepared:
        key = service_key(config.gateway.key_file, prepared.directory.gateway_key)
        if key_file is None:
            options.output.note(f"key: {key}")
        try:
            return run_prepared(prepared, options)
        except LostActor:  # already reported
            return EXIT_FAILED
