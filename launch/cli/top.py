"""The command ``flexmarl top``."""

import asyncio
import shlex
import sys
from contextlib import closing
from pathlib import Path

import click

from ...actors.errors import RecipeError
from ..run_folder.run_directory import RunDirectory
from .options import FilePath


@click.command()
@click.argument("run_dir", type=FilePath(), metavar="RUN")
def top(run_dir: Path) -> int:
    """Show a run in the terminal: agents, instances, slots, waits, reasons for slowness, warnings. It may be running.

    q or ctrl-C leaves it; the run continues.

    \b
    Example:
      flexmarl top runs/first
    """
    directory = RunDirectory.recorded(run_dir)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            f"top needs a terminal; `flexmarl status {shlex.quote(str(run_dir))}` prints the run once"
        )
    return asyncio.run(_show(directory))


async def _show(directory: RunDirectory) -> int:
    # Imported here: they take a second.
    from ..monitoring.page.live_status import follow_status
    from ..monitoring.page.recorded_run import RecordedRun
    from .signals import stop_signals

    try:
        from ..monitoring.top.top_app import TopApp  # an extra
    except ImportError as error:
        raise RecipeError(f"top needs the extra: pip install 'flexmarl[top]' ({error})") from None
    loop = asyncio.get_running_loop()
    with closing(RecordedRun(directory.path)) as run:
        app = TopApp(run)
        for number in stop_signals():  # a signal too leaves the terminal as it was
            loop.add_signal_handler(number, app.exit)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(follow_status(run, with_waits=True), name="status of the run")
            await app.run_async()
            asking.cancel()
    return app.return_code or 0
