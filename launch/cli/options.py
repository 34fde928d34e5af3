"""Arguments and options that several commands have in common."""

from pathlib import Path

import click

RUN = click.Path(path_type=Path)  # the folder of a run, or an address file of it
runs_option = click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="The folder of all runs.",
)
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
lengths_option = click.option(
    "--from",
    "recorded",
    type=click.Path(path_type=Path),
    metavar="RUN_DIR",
    help="Take the lengths of answers from the steps of a run, with agents of the same names.",
)
