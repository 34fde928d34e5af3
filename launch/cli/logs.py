"""The command ``flexmarl logs``.

RUN is the folder of a run, or an address file of it: ``runs/NAME/address``, or one that ``flexmarl admit`` has written.
With such a file the command works from every host that reaches the run.
"""

from pathlib import Path

import click

from ..monitoring.console.echo import echo_file
from ..run.connected_run import query_run
from ..run_folder.run_directory import RunDirectory
from .options import RUN


@click.command()
@click.argument("run", type=RUN)
@click.argument("actor", default="launcher")
def logs(run: Path, actor: str) -> int:
    """Print the log of an actor of a run, by default the launcher's; with an address file, its last MiB.

    \b
    Examples:
      flexmarl logs runs/first trainer
      flexmarl logs first.address store
    """
    if run.is_file():
        text = query_run(run, lambda connected: connected.log(actor))
    else:
        text = RunDirectory.existing(run).log_of(actor).read_bytes().decode(errors="replace")
    echo_file(text)
    return 0
