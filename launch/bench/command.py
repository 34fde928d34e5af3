"""The command ``flexmarl bench calls``."""

import json
import logging
import sys

import click
import structlog
import uvloop
from rich.console import Console


@click.group()
def bench() -> None:
    """Measures this machine."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--only", type=click.Choice(["ipc", "tcp_curve"]), help="One transport. Default: both.")
@click.option(
    "--rounds", type=click.IntRange(1), help="Of which the median is shown. Default: 5, 1 with --quick."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="How long each kind of call is made in each round. Default: 0.5, 0.1 with --quick.",
)
@click.option(
    "--in-flight", type=click.IntRange(1), default=1000, show_default=True, help="Calls under way at once."
)
@click.option(
    "--callers", type=click.IntRange(1), default=8, show_default=True, help="Processes that call one actor."
)
@click.option("--array-mib", type=click.IntRange(1), help="Size of the array. Default: 256, 32 with --quick.")
@click.option(
    "--others/--no-others", default=True, show_default=True, help="Ray and xoscar too, where installed."
)
@click.option("--quick", is_flag=True, help="A first look in a quarter of a minute; not for comparing.")
def calls(
    as_json: bool,
    only: str | None,
    rounds: int | None,
    seconds: float | None,
    in_flight: int,
    callers: int,
    array_mib: int | None,
    others: bool,
    quick: bool,
) -> int:
    """Measure calls between two processes against bare ZeroMQ, over ipc and over TCP with CURVE.

    Latency of an empty call and of a 1 KiB dict, calls per second with 1000 in flight, one-way messages, 8 callers of
    one actor, a 256 MiB array, the start of an actor's process; each against its goal. For comparison Ray and xoscar,
    where they are installed: pip install flexmarl[bench].

    \b
    Examples:
      flexmarl bench calls
      flexmarl bench calls --json > calls.json
      flexmarl bench calls --quick --only ipc --no-others

    Nothing else should be busy on the machine. What is under way is said on standard error; ctrl-C stops it.
    """
    from . import show  # imported here: numpy and rich's tables are for those who measure
    from .calls import TRANSPORTS, Options, measure, parts

    options = Options(
        transports=tuple(transport for transport in TRANSPORTS if only in (None, transport)),
        rounds=rounds or (1 if quick else 5),
        seconds=seconds or (0.1 if quick else 0.5),
        in_flight=in_flight,
        callers=callers,
        array_mib=array_mib or (32 if quick else 256),
        others=others,
    )
    # Standard output is for the result; of the runtime's own lines only what went wrong matters here.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    with show.progress(Console(stderr=True), parts(options)) as tell:
        result = uvloop.run(measure(options, tell))
    if as_json:
        click.echo(json.dumps(result))
    else:
        show.tables(Console(), result)
    return 0
