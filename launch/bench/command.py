"""The commands ``flexmarl bench calls``, ``flexmarl bench store`` and ``flexmarl bench pipeline``."""

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
    from . import result_tables  # imported here: numpy and rich's tables are for those who measure
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
    _log_warnings_only()
    with result_tables.progress(Console(stderr=True), parts(options)) as tell:
        result = uvloop.run(measure(options, tell))
    if as_json:
        click.echo(json.dumps(result))
    else:
        result_tables.tables(Console(), result)
    return 0


@bench.command()
@click.argument("overrides", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--rounds", type=click.IntRange(1), help="Of which the median is shown. Default: 3, 1 with --quick."
)
@click.option(
    "--steps",
    type=click.IntRange(2),
    help="Of each run; the first is not counted. Default: 6, 3 with --quick.",
)
@click.option("--seed", type=click.IntRange(0), default=2048, show_default=True, help="Of all draws.")
@click.option("--quick", is_flag=True, help="A first look in less than a minute; not for comparing.")
def pipeline(
    overrides: tuple[str, ...], as_json: bool, rounds: int | None, steps: int | None, seed: int, quick: bool
) -> int:
    """Measure how well rollout and training overlap: a step in the modes sync and strict, with simulated engines.

    Real runs of three agents that are called 1:2:6 times per trajectory and answer at lengths with a long tail
    (lognormal, sigma 1). Engines and trainer sleep instead of computing. Beside them what no step with a global
    barrier can be faster than, and the CPU that arranging it all takes.

    \b
    Examples:
      flexmarl bench pipeline
      flexmarl bench pipeline --json > pipeline.json
      flexmarl bench pipeline --quick
      flexmarl bench pipeline training.queries_per_step=64 agents.checker.instances=2

    Nothing else should be busy on the machine. What is under way is said on standard error; ctrl-C stops it.
    """
    from . import result_tables
    from .pipeline import Options, measure, parts

    options = Options(
        rounds=rounds or (1 if quick else 3),
        steps=steps or (3 if quick else 6),
        seed=seed,
        overrides=overrides,
    )
    options.config("sync")  # refused before anything is begun
    _log_warnings_only()
    with result_tables.progress(Console(stderr=True), parts(options)) as tell:
        result = measure(options, tell)
    if as_json:
        click.echo(json.dumps(result))
    else:
        result_tables.pipeline_tables(Console(), result)
    return 0


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--rounds", type=click.IntRange(1), help="Of which the median is shown. Default: 5, 1 with --quick."
)
@click.option("--quick", is_flag=True, help="A first look in a few seconds; not for comparing.")
def store(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure the experience store: samples of 10 KiB put and got by two client processes, journal on.

    \b
    Examples:
      flexmarl bench store
      flexmarl bench store --json > store.json

    Nothing else should be busy on the machine. Needs 1 GiB of memory. Ctrl-C stops it.
    """
    from . import result_tables
    from .store import PUT_BATCH, Options, measure, parts

    options = Options(rounds=rounds or (1 if quick else 5), samples=PUT_BATCH * (50 if quick else 400))
    _log_warnings_only()
    with result_tables.progress(Console(stderr=True), parts(options)) as tell:
        result = uvloop.run(measure(options, tell))
    if as_json:
        click.echo(json.dumps(result))
    else:
        result_tables.goals_tables(Console(), "experience store", result)
    return 0


def _log_warnings_only() -> None:
    """Standard output is for the result; of the runtime's own lines only what went wrong matters here."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
