"""Measures the time from the command to the first trained step, on one host and with further nodes.

The hosts are network namespaces of this machine; without root all are loopback, which ``network`` in the result says.
They share the machine's cores. Engines and trainer are simulated. The keys of the result:

    one_host_s      from the start of ``flexmarl train`` to the end of its first step
    two_nodes_s     the same with a node on another host, which is started at the same moment
    added_s         the second minus the first
    joined_s        from the moment at which a run waits for its nodes, which are running and wait for it, until all
                    have joined and each actor has its place
    nodes           the number of those nodes, each a process of its own
    rounds, goals, machine, network, settings
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

from flexmarl.launch.bench import machine, namespaces
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import medians, rounded
from flexmarl.launch.bench.namespaces import Host
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.errors import BenchmarkFailed
from flexmarl.launch.hosts import env
from flexmarl.launch.monitoring.formatting import compact

RECIPE: Final = Path(__file__).parent / "pipeline_recipe"
NODES: Final = 16
_PATIENCE_S: Final = 300.0
_END_S: Final = 30.0
# Little work: the start is measured.
_SMALL: Final = (
    "training={steps: 1000, queries_per_step: 2, trajectories_per_query: 2, micro_batch: 2}",
    "agent_defaults.engine.token_s=1.0e-6",
    "agent_defaults.engine.install_s=0.0",
)

GOALS = (
    Goal("added_s", "first step with a further node, s more than alone", 15, at_most=True),
    Goal("joined_s", "nodes that are running, joined and placed, s", 5, at_most=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``nodes``: that join at once."""

    rounds: int = 3
    nodes: int = NODES


def parts(options: Options) -> int:
    return 3 * options.rounds


async def measure(options: Options, report: Callable[[str], None]) -> dict[str, Any]:
    """The object that ``--json`` prints. Raises BenchmarkFailed."""
    described = await machine.describe()
    reason = namespaces.missing()
    with namespaces.two_hosts() as hosts:
        rounds = [await _round(hosts, options, report) for _ in range(options.rounds)]
    figures = medians(rounds)
    return result_of(
        options,
        figures,
        GOALS,
        described,
        nodes=options.nodes,
        rounds={key: [rounded(values[key]) for values in rounds] for key in figures},
        network="two network namespaces" if reason is None else f"loopback, without namespaces: {reason}",
    )


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table(f"start of a run, {result['nodes']} nodes", result["goals"]))
    one_host_s, two_nodes_s = compact(result["one_host_s"]), compact(result["two_nodes_s"])
    console.print(
        Text(f"{result['network']}; first step after {one_host_s} s on one host, {two_nodes_s} s with a node")
    )
    warn_if_busy(console, result)


async def _round(
    hosts: tuple[Host, Host], options: Options, report: Callable[[str], None]
) -> dict[str, float]:
    report("one host")
    one_host_s = await _first_step(hosts, 0)
    report("a head and a node")
    two_nodes_s = await _first_step(hosts, 1)
    report(f"{options.nodes} nodes that wait for the run")
    joined = await _joined(hosts, options.nodes)
    return {
        "one_host_s": one_host_s,
        "two_nodes_s": two_nodes_s,
        "added_s": two_nodes_s - one_host_s,
        "joined_s": joined,
    }


async def _first_step(hosts: tuple[Host, Host], nodes: int) -> float:
    clock = asyncio.get_running_loop().time
    with _folder() as runs:
        began = clock()
        async with _running_nodes(hosts[1], Path(runs), nodes), _head(hosts[0], Path(runs), nodes) as head:
            await head.until(lambda line: line["event"] == "step")
            return clock() - began


async def _joined(hosts: tuple[Host, Host], nodes: int) -> float:
    with _folder() as runs:
        async with _running_nodes(hosts[1], Path(runs), nodes) as waiting:
            for node in waiting:
                await node.until_text("waiting for the run")
            async with _head(hosts[0], Path(runs), nodes) as head:
                begun = await head.until(lambda line: "waiting for nodes" in line.get("text", ""))
                placed = await head.until(lambda line: line.get("text", "").startswith("starting actors"))
                return float(placed["time"] - begun["time"])


def _folder() -> "TemporaryDirectory[str]":
    return TemporaryDirectory(prefix="flexmarl-bench-")


class _Command:
    """A process of ``flexmarl`` on a host. It is stopped at the end of the block."""

    def __init__(self, host: Host, arguments: Sequence[str]) -> None:
        self._command = [*host.command, sys.executable, "-P", "-m", "flexmarl.launch.cli.main", *arguments]

    async def __aenter__(self) -> "_Command":
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            env=env.actor_environment(), start_new_session=True, limit=1 << 24,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_END_S):
                await self._process.communicate()
        except TimeoutError:
            self._process.kill()
            # Also reads to the end: from Python 3.12 on wait() alone may return with the pipe's transport still open.
            await self._process.communicate()

    async def until(self, found: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The next object of its output for which ``found`` is true. Raises BenchmarkFailed if it ends before."""
        while True:
            record: dict[str, Any] = json.loads(await self._line())
            if found(record):
                return record

    async def until_text(self, text: str) -> None:
        """Raises BenchmarkFailed if it ends before."""
        while text not in await self._line():
            pass

    async def _line(self) -> str:
        assert self._process.stdout is not None, "it is a pipe"
        async with asyncio.timeout(_PATIENCE_S):
            line = await self._process.stdout.readline()
        if not line:
            raise BenchmarkFailed(f"{' '.join(self._command)} has ended; see its output above")
        return line.decode()


def _head(host: Host, runs: Path, nodes: int) -> _Command:
    wanted = ["--nodes", str(nodes), f"network.listen={host.address}"] if nodes else []
    instances = f"agent_defaults.instances={max(1, nodes)}"
    words = [
        "train",
        str(RECIPE),
        "--json",
        "--runs",
        str(runs),
        "--name",
        "run",
        instances,
        *_SMALL,
        *wanted,
    ]
    return _Command(host, words)


@asynccontextmanager
async def _running_nodes(host: Host, runs: Path, count: int) -> AsyncIterator[list[_Command]]:
    join = ["node", "--join", str(runs / "run" / "address")]
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(_Command(host, [*join, "--name", f"node-{number}"]))
            for number in range(count)
        ]


@click.command()
@common_options(rounds=3, quick_time="a minute")
def start(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure the start of a run: from the command to the first step, alone and with a node on another host; and the
    time in which 16 nodes join.

    \b
    Examples:
      scripts/bench/run start
      scripts/bench/run start --json > start.json

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    options = Options(rounds=rounds or (1 if quick else 3))
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
