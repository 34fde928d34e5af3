"""The command ``flexmarl node``: gives this host to a run."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Final

import click
import uvloop

from ...core.base.names import checked_name
from ...core.base.texts import text_of
from ...core.errors import FlexmarlError, is_loss
from ...core.telemetry import configure_logging
from ..hosts.nodes.joining import Dismissal
from ..hosts.nodes.node_process import NodeOptions, serve
from ..monitoring.console.echo import echo
from ..run.run_address import RunAddress
from .signals import SAME_REQUEST_S, stop_signals

_STDIN = "-"
_STAY_S: Final = 60.0


@click.command()
@click.option(
    "--join",
    required=True,
    metavar="FILE|ADDRESS",
    help="The run's file with its address and keys, runs/NAME/address; - reads it from the standard input. Or another "
    "address of the head, tcp://HOST:PORT, with --key.",
)
@click.option("--key", metavar="FILE", help="The run's file, if --join is an address.")
@click.option("--name", default="", help="The node's name. Default: the host's.")
@click.option(
    "--listen",
    default="",
    metavar="ADDRESS",
    help="The address of this host. Default: that which the head sees.",
)
@click.option(
    "--wait-s",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    help="The longest wait for the file and the run, in seconds.",
)
@click.option(
    "--again",
    is_flag=True,
    help="After the run's end, or the loss of its head, wait for the next run at the same place (train --restarts).",
)
def node(join: str, key: str | None, name: str, listen: str, wait_s: float, again: bool) -> int:
    """Give this host to a run: its actors are started here too, until it ends.

    The head is `flexmarl train RECIPE --nodes N network.listen=ADDRESS`. The run's folder, the recipe and models have
    the same paths on all hosts.

    \b
    Examples:
      flexmarl node --join /shared/runs/first/address
      ssh head cat runs/first/address | flexmarl node --join -
      flexmarl node --join tcp://10.0.0.1:41234 --key address
    """
    is_address = join.startswith("tcp://")
    if is_address != (key is not None):
        raise click.UsageError("--key FILE is for --join tcp://HOST:PORT, which needs it")
    if again and (is_address or join == _STDIN):
        raise click.UsageError("--again needs --join FILE: the next run has another address and other keys")
    if name:
        try:
            checked_name(name)
        except ValueError as error:
            raise click.UsageError(f"--name: {error}") from None
    file = key or join
    address_text = sys.stdin.buffer.read() if file == _STDIN else None

    def find() -> RunAddress:
        path = Path(file)
        run = RunAddress.load(path) if address_text is None else RunAddress.parse(address_text, path)
        return RunAddress(join, run.keys) if is_address else run

    if is_address and file != _STDIN and not Path(file).exists():
        raise click.UsageError(f"--key {file}: there is no such file")
    configure_logging("node", sys.stderr, "warning")
    options = NodeOptions(find, name, listen, wait_s, again)
    while True:
        try:
            dismissal, is_last = uvloop.run(_until_signal(options))
        except FlexmarlError as error:
            if not is_loss(error):  # it would come again
                raise
            dismissal, is_last = Dismissal(text_of(error), failed=True), False
        echo(f"the node ends: {dismissal.reason}")
        if is_last or not again:
            return int(dismissal.failed)


async def _until_signal(options: NodeOptions) -> tuple[Dismissal, bool]:
    """The end of the node, and True if it was asked to end. Raises click.Abort after one of ``stop_signals``.

    After the first SIGTERM the node of a run stays until the run dismisses it, for a minute at most: Slurm signals all
    hosts of a job at once, and the head needs this one for its last checkpoint."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    joined = False
    ends_s: float | None = None  # the loop's time from which a further SIGTERM is another request

    def has_joined() -> None:
        nonlocal joined
        joined = True

    def handle_sigterm() -> None:
        nonlocal ends_s
        if not joined or (ends_s is not None and loop.time() >= ends_s):
            task.cancel()
        elif ends_s is None:
            ends_s = loop.time() + SAME_REQUEST_S
            loop.call_later(_STAY_S, task.cancel)
            echo(
                f"SIGTERM: the node stays until the run ends, {_STAY_S:g} s at most; ctrl-C or SIGTERM once more ends "
                "it at once"
            )

    for number in stop_signals():
        loop.add_signal_handler(number, handle_sigterm if number == signal.SIGTERM else task.cancel)
    try:
        return await serve(options, echo, has_joined), ends_s is not None
    except asyncio.CancelledError:
        raise click.Abort from None
