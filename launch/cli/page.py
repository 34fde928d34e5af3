"""The command ``flexmarl page``."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import click

from ..monitoring.console.echo import echo


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN [RUN]...")
@click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="The address, without encryption. Port 0: a free one.",
)
def page(run_dirs: Sequence[Path], listen: str) -> int:
    """Show runs in a browser: progress, curves, trajectories, settings. They may be running; nothing is changed.

    The printed address has a key in it, and is all that a reader of the runs needs. Several runs are laid on each
    other. Ctrl-C ends it.

    \b
    Examples:
      flexmarl page runs/first
      flexmarl page runs/lr-* --listen 127.0.0.1:7788
    """
    asyncio.run(_serve(run_dirs, listen))
    return 0


async def _serve(run_dirs: Sequence[Path], listen: str) -> None:
    # Imported here: it takes a second.
    from ..monitoring.page.server import served_page

    async with served_page(run_dirs, listen) as address:
        echo(address)
        await asyncio.Event().wait()  # until ctrl-C
