"""The commands ``flexmarl bench calls``, ``bench tensors`` and ``bench network``."""

from functools import partial

import click

from ..bench.command import common_options, run_benchmark


@click.group()
def bench() -> None:
    """Measure calls, states and the network of this machine.

    All other benchmarks are commands of scripts/bench/run, in a checkout.

    \b
    Examples:
      flexmarl bench calls --quick
      flexmarl bench tensors
      flexmarl bench network --json > network.json
    """


@bench.command()
@click.option("--only", type=click.Choice(["ipc", "tcp_curve"]), help="One transport. Default: both.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="Duration of each kind of call in each round. Default: 0.5, 0.1 with --quick.",
)
@click.option(
    "--in-flight", type=click.IntRange(1), default=1000, show_default=True, help="Concurrent calls."
)
@click.option(
    "--callers", type=click.IntRange(1), default=8, show_default=True, help="Processes that call one actor."
)
@click.option("--array-mib", type=click.IntRange(1), help="Size of the array. Default: 256, 32 with --quick.")
@click.option(
    "--others/--no-others", default=True, show_default=True, help="Measure Ray and xoscar too, if installed."
)
@common_options(rounds=5, quick_time="a quarter of a minute")
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

    Latency of an empty call and of a 1 KiB dict, calls per second with 1000 in flight and by gather, one-way messages,
    8 callers of one actor, a 256 MiB array, the start of an actor's process; each with its goal. For comparison Ray
    and xoscar, if they are installed: pip install flexmarl[bench].

    \b
    Examples:
      flexmarl bench calls
      flexmarl bench calls --json > calls.json
      flexmarl bench calls --quick --only ipc --no-others

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    from ..bench.call_tables import tables  # imported here: only benchmarks need numpy and rich's tables
    from ..bench.calls import TRANSPORTS, Options, measure, parts

    options = Options(
        transports=tuple(transport for transport in TRANSPORTS if only in (None, transport)),
        rounds=rounds or (1 if quick else 5),
        seconds=seconds or (0.1 if quick else 0.5),
        in_flight=in_flight,
        callers=callers,
        array_mib=array_mib or (32 if quick else 256),
        others=others,
    )
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)


@bench.command()
@common_options(rounds=5, quick_time="a few seconds")
def tensors(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure Set and Get of 256 MiB and 1 GiB between two processes, the digest checked, against a copy by one thread.

    \b
    Examples:
      flexmarl bench tensors
      flexmarl bench tensors --json > tensors.json

    Nothing else should be running on the machine. Needs 8 GiB of memory. Progress is on standard error; ctrl-C stops
    it.
    """
    from ..bench.tensors import SIZES, Options, measure, parts, tables

    options = Options(rounds=rounds or (1 if quick else 5), sizes=SIZES[:1] if quick else SIZES)
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)


@bench.command()
@click.option(
    "--plain", is_flag=True, help="States without encryption (network.bulk: trusted), beside bare plain TCP."
)
@common_options(rounds=3, quick_time="half a minute")
def network(as_json: bool, plain: bool, rounds: int | None, quick: bool) -> int:
    """Measure states and calls between two hosts: network namespaces of this machine, or loopback without root.

    Set on one, Get of 1 GiB into existing memory on the other, against bare receiving with the same encryption; four
    readers against one; a state of which 1 % is new against a new one; an empty call against bare ZeroMQ with CURVE.

    \b
    Examples:
      flexmarl bench network
      flexmarl bench network --json > network.json

    Nothing else should be running on the machine. Needs 12 GiB of memory. Progress is on standard error; ctrl-C stops
    it.
    """
    from ..bench.network import SIZE, Options, measure, parts, tables

    options = Options(
        rounds=rounds or (1 if quick else 3), size_bytes=SIZE // 8 if quick else SIZE, encrypted=not plain
    )
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
