"""The command ``flexmarl stop``.

RUN is the folder of a run, or an address file of it: ``runs/NAME/address``, or one that ``flexmarl admit`` has written.
With such a file the command works from every host that reaches the run.
"""

from pathlib import Path

import click

from ..monitoring.console.echo import echo, echo_json
from ..run.connected_run import query_run
from .options import RUN, as_json_option


@click.command()
@click.argument("run", type=RUN)
@click.option("--now", is_flag=True, help="At once, without a checkpoint.")
@as_json_option
def stop(run: Path, now: bool, as_json: bool) -> int:
    """Stop a running run as ctrl-C does: after the steps under way, with a checkpoint. It does not wait for the end.

    \b
    Examples:
      flexmarl stop runs/first
      flexmarl stop runs/first --now
    """
    graceful = query_run(run, lambda connected: connected.stop(now=now, by="flexmarl stop"))
    how = "after the steps under way, with a checkpoint" if graceful else "at once"
    if as_json:
        echo_json({"checkpoint": graceful})
    else:
        echo(f"{run} stops {how}")
    return 0
