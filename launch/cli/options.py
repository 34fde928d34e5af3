"""Arguments and options that several commands have in common."""

from pathlib import Path
from typing import Any

import click


class FilePath(click.Path):
    """A path that has a name: an empty one, of a variable that is not set, would be the working directory."""

    def __init__(self, **options: Any) -> None:
        """``options``: of click's Path."""
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raises click's BadParameter for an empty text."""
        if value == "":
            self.fail("the path is empty: write `.` for the working directory", param, ctx)
        return super().convert(value, param, ctx)


RUN = FilePath()  # the folder of a run, or an address file of it
runs_option = click.option(
    "--runs",
    type=FilePath(),
    default=Path("runs"),
    show_default=True,
    help="The folder of all runs.",
)
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
workload_option = click.option(
    "--from",
    "recorded",
    type=FilePath(),
    metavar="RUN_DIR",
    help="Take the workload that a run has measured: answers, prompts, calls. Its agents have the same names.",
)
