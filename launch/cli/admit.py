"""The command ``flexmarl admit``.

RUN is the folder of a run, or an address file of it: ``runs/NAME/address``, or one that ``flexmarl admit`` has written.
With such a file the command works from every host that reaches the run.
"""

from pathlib import Path

import click

from ..monitoring.console.echo import echo
from ..run.connected_run import query_run
from ..run.run_control import CALLS, Right
from .options import RUN, FilePath


@click.command()
@click.argument("run", type=RUN)
@click.argument("file", type=FilePath(dir_okay=False))
@click.option(
    "--may",
    "rights",
    type=click.Choice(list(CALLS)),
    multiple=True,
    default=["watch"],
    show_default=True,
    help="watch: status, steps, events and logs. judge: this, and its samples. submit: watch, and submit queries "
    "and logs. share: watch, and train its groups too. stop: watch, and stop. May be repeated.",
)
def admit(run: Path, file: Path, rights: tuple[Right, ...]) -> int:
    """Write FILE, with which another user, host or service reaches a running run, and may do no more than --may.

    The run has to listen over TCP (network.listen). FILE is a secret, and good until the run ends; runs/NAME/address
    itself may do everything.

    \b
    Examples:
      flexmarl admit runs/first dashboard.address
      flexmarl admit runs/first judge.address --may judge
      flexmarl admit runs/first first.share --may share
    """
    query_run(run, lambda connected: connected.admit(file, rights))
    echo(f"{file}: its holder may {' and '.join(dict.fromkeys(('watch', *rights)))} {run}, until it ends")
    return 0
