"""The command ``flexmarl report``."""

from pathlib import Path

import click

from ..monitoring.console.echo import echo
from ..monitoring.page.frozen_page import write_report
from ..run_folder.run_directory import RunDirectory
from .options import FilePath


@click.command()
@click.argument("run_dir", type=FilePath())
def report(run_dir: Path) -> int:
    """Write report.html of a run again. The run may be running.

    \b
    Example:
      flexmarl report runs/first-try
    """
    echo(str(write_report(RunDirectory.recorded(run_dir).path)))
    return 0
