"""The commands ``flexmarl bench calls``, ``bench store``, ``bench pipeline``, ``bench rollout`` and so on."""

from functools import partial

import click

from ..bench.command import common_options, run_benchmark


@click.group()
def bench() -> None:
    """Measure this machine."""


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
@click.argument("overrides", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option(
    "--steps",
    type=click.IntRange(2),
    help="Steps of each run; the first is not counted. Default: 6, 3 with --quick.",
)
@click.option("--seed", type=click.IntRange(0), default=2048, show_default=True, help="Seed of all draws.")
@common_options(rounds=3, quick_time="less than a minute")
def pipeline(
    overrides: tuple[str, ...], as_json: bool, rounds: int | None, steps: int | None, seed: int, quick: bool
) -> int:
    """Measure the overlap of rollout and training: a step in the modes sync and strict, with simulated engines.

    Real runs of three agents that are called 1:2:6 times per trajectory, with answers of long-tailed lengths
    (lognormal, sigma 1). Engines and trainer sleep instead of computing. Also shown: the lower bound of a step with a
    global barrier, and the CPU time of the orchestration.

    \b
    Examples:
      flexmarl bench pipeline
      flexmarl bench pipeline --json > pipeline.json
      flexmarl bench pipeline --quick
      flexmarl bench pipeline training.queries_per_step=64 agents.checker.instances=2

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    from ..bench.pipeline import Options, measure, parts, tables

    options = Options(
        rounds=rounds or (1 if quick else 3),
        steps=steps or (3 if quick else 6),
        seed=seed,
        overrides=overrides,
    )
    options.config("sync")  # raises for wrong overrides before anything starts
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)


@bench.command()
@click.argument("overrides", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option("--seed", type=click.IntRange(0), default=2048, show_default=True, help="The first seed.")
@common_options(rounds=3, quick_time="a few seconds")
def balance(overrides: tuple[str, ...], as_json: bool, rounds: int | None, seed: int, quick: bool) -> int:
    """Measure what it gains to move instances between policies: a step with 4 policies and 16 instances, in virtual
    time, with simulated engines.

    76 % of the calls are to one agent. Compared with equal numbers of instances, with the best fixed numbers, and with
    a lower bound. Each round has a seed of its own; the figures depend on nothing else.

    \b
    Examples:
      flexmarl bench balance
      flexmarl bench balance --json > balance.json
      flexmarl bench balance balance.threshold=10 --seed 7

    Progress is on standard error; ctrl-C stops it.
    """
    from ..bench.balance import Options, measure, parts, tables

    options = Options(
        rounds=rounds or (1 if quick else 3), seed=seed, searched=2 if quick else 12, overrides=overrides
    )
    options.config(seed)  # raises for wrong overrides before anything starts
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)


@bench.command()
@click.option("--steps", type=click.IntRange(1), help="Steps of each round. Default: 8, 3 with --quick.")
@click.option("--seed", type=click.IntRange(0), default=2048, show_default=True, help="The first seed.")
@common_options(rounds=3, quick_time="a few seconds")
def pool(as_json: bool, rounds: int | None, steps: int | None, seed: int, quick: bool) -> int:
    """Measure what it gains to share slots between policies: steps of training in virtual time, on a third of the slots
    that 5, 10 or 15 policies need all at once.

    Compared with slots divided over the policies once and for all, and with a lower bound. Also the time that swaps
    cost. Each round has a seed of its own; the figures depend on nothing else.

    \b
    Examples:
      flexmarl bench pool
      flexmarl bench pool --json > pool.json
      flexmarl bench pool --steps 16 --seed 7

    Progress is on standard error; ctrl-C stops it.
    """
    from ..bench.pool import Options, measure, parts, tables

    options = Options(
        rounds=rounds or (1 if quick else 3),
        steps=steps or (3 if quick else 8),
        seed=seed,
        searched=8 if quick else 60,
    )
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)


@bench.command()
@common_options(rounds=5, quick_time="a few seconds")
def store(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure the experience store: samples of 10 KiB put and got by two client processes, journal on; and single puts
    beside 12 expensive expressions of other clients.

    \b
    Examples:
      flexmarl bench store
      flexmarl bench store --json > store.json

    Nothing else should be running on the machine. Needs 1 GiB of memory. Progress is on standard error; ctrl-C stops
    it.
    """
    from ..bench.store import PUT_BATCH, Options, measure, parts, tables

    options = Options(rounds=rounds or (1 if quick else 5), samples=PUT_BATCH * (50 if quick else 400))
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)


@bench.command()
@click.option("--vllm/--no-vllm", default=True, show_default=True, help="Measure vLLM too, if installed.")
@common_options(rounds=5, quick_time="half a minute")
def rollout(as_json: bool, vllm: bool, rounds: int | None, quick: bool) -> int:
    """Measure the embedded engine: 64 requests of uneven length that arrive at random, beside model.generate and vLLM
    with the same tiny model; the pause by new weights of 100 MB beside a copy of as many bytes.

    \b
    Examples:
      flexmarl bench rollout
      flexmarl bench rollout --json > rollout.json
      flexmarl bench rollout --quick --no-vllm

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    from ..bench.rollout import Options, measure, parts, tables

    options = Options(rounds=rounds or (1 if quick else 5), vllm=vllm)
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)


@bench.command()
@common_options(rounds=3, quick_time="a few seconds")
def router(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure the router: turns of 8 rollout workers, routed to 512 instances.

    By the rules alone and over ipc, per second of CPU time; and the time until a turn has its route, at 1,000 turns/s.

    \b
    Examples:
      flexmarl bench router
      flexmarl bench router --json > router.json

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    from ..bench.router import Options, measure, parts, tables

    options = Options(rounds=rounds or (1 if quick else 3), turns=4_096 if quick else 20_000)
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)


@bench.command()
@click.option(
    "--cycles", type=click.IntRange(1), help="Switches there and back. Default: 1000, 50 with --quick."
)
@common_options(rounds=5, quick_time="half a minute")
def swap(as_json: bool, cycles: int | None, rounds: int | None, quick: bool) -> int:
    """Measure how policies of PyTorch take turns on a slot worker of a shared training pool.

    Suspending and resuming a state of about 1 GB against a copy by one thread; a switch between two states of 100 MB;
    1,000 switches there and back in the middle of a step, after which loss, weights and memory must be unchanged.

    \b
    Examples:
      flexmarl bench swap
      flexmarl bench swap --json > swap.json

    Nothing else should be running on the machine. Needs 16 GB of memory. Progress is on standard error; ctrl-C stops
    it.
    """
    from ..bench.swap import LARGE, SMALL, Options, measure, parts, tables

    options = Options(
        rounds=rounds or (1 if quick else 5),
        cycles=cycles or (50 if quick else 1000),
        large=SMALL if quick else LARGE,
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


@bench.command()
@common_options(rounds=3, quick_time="a minute")
def start(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure the start of a run: from the command to the first step, alone and with a node on another host; and the
    time in which 16 nodes join.

    \b
    Examples:
      flexmarl bench start
      flexmarl bench start --json > start.json

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    from ..bench.start import Options, measure, parts, tables

    options = Options(rounds=rounds or (1 if quick else 3))
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
