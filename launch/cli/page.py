"""The command ``flexmarl page``."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from ..monitoring.console.echo import echo
from ..monitoring.page.demo_run import unpacked_demo
from .options import FilePath


@click.command()
@click.argument("run_dirs", nargs=-1, type=FilePath(), metavar="RUN [RUN]...")
@click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="The address, without encryption. Port 0: a free one.",
)
@click.option("--demo", is_flag=True, help="Show a recorded run of two agents that comes with flexmarl.")
def page(run_dirs: Sequence[Path], listen: str, demo: bool) -> int:
    """Show runs in a browser: progress, curves, trajectories, settings. They may be running; nothing is changed.

    The printed address has a key in it, and is all that a reader of the runs needs. Several runs are laid on each
    other. Ctrl-C ends it.

    \b
    Examples:
      flexmarl page runs/first
      flexmarl page runs/lr-* --listen 127.0.0.1:7788
      flexmarl page --demo
    """
    if demo == bool(run_dirs):
        raise click.UsageError("page takes the folders of runs, or --demo")
    if demo:
        with unpacked_demo() as run:
            asyncio.run(_serve([run], listen))
    else:
        asyncio.run(_serve(run_dirs, listen))
    return 0


async def _serve(run_dirs: Sequence[Path], listen: str) -> None:
    # Imported here: it takes a second.
    from ..monitoring.page.server import served_page

    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    async with served_page(run_dirs, listen) as address:
        echo(address)
        await terminated.wait()  # or until ctrl-C
