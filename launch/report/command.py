"""The command ``flexmarl report``."""

from pathlib import Path

import click

from ..console.echo import echo
from ..run_directory import RunDirectory
from .report import write_report


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
def report(run_dir: Path) -> int:
    """Write report.html of a run again. The run may be running.

    \b
    Example:
      flexmarl report runs/first-try
    """
    echo(str(write_report(RunDirectory.recorded(run_dir).path)))
    return 0
