"""``flexmarl bench network``: states and calls between two hosts, which are network namespaces of this machine.

A namespace has its own addresses and devices; both share the machine's cores. Without root both sides use loopback,
which ``network`` in the result says. Everything is compared with bare connections of the same security, in the same
round. The keys of the result:

    bare_gb_s            received by ``recv_into`` in as many threads as are faster, 1 or 4, without digests
    get_gb_s             Get of a state of which every value is new, into memory that exists, digests checked
    get_share            the second / the first
    four_s, one_s        Gets by four processes of the far host at once, until the last has ended; by one of them
    readers_ratio        the first / the second
    readers_bound        the same, if four readers took only that longer that four bare copies at once take than one:
                         receiving by one keeps two cores busy, so the other copies can't be made meanwhile
    whole_arrives_s      until a state can be read on the far host
    delta_arrives_s      the same, of a bf16 state of which 1 % of the values are new
    delta_ratio          the second / the first
    delta_get_ratio      the same for a Get into memory that exists, which copies the whole state
    delta_bytes_share    bytes that came over the network / the size of the state
    bare_cpu_s, one_cpu_s, four_cpu_s, delta_cpu_s    processor seconds of these, of the owner and all readers:
                         comparable also if the machine is busy
    whole_arrives_cpu_s, delta_arrives_cpu_s    the same, until the state can be read on the far host
    set_cpu_s, delta_set_cpu_s    of the Sets, which search the changes if there are few
    passes_cpu_s         processor seconds to compare two states, and to copy one and compute its digests, in chunks
                         that stay in the cache: a Get of changes has to do this at least, on either host a part
    call_p50_us, bare_p50_us    an empty call over TCP with CURVE, and by bare ZeroMQ with CURVE; ``calls_ratio``
    rounds, goals, machine, network, settings
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from ...core.wire.curve import Keys
from ..errors import BenchmarkFailed
from ..hosts import env
from ..monitoring.formatting import compact
from . import machine, namespaces
from .goals import Goal
from .measure import medians, rounded
from .namespaces import Host
from .result_tables import goals_table, warn_if_busy
from .results import result_of

SIZE: Final = 1 << 30
CHANGED: Final = 0.01
READERS: Final = 4
_PATIENCE_S: Final = 600.0

GOALS = (
    Goal("get_share", "Get of a state, share of bare receiving", 0.9, at_most=False),
    Goal("readers_ratio", "four readers of a host against one, ratio", 1.15, at_most=True),
    Goal("delta_ratio", "1 % new values against all, ratio", 0.1, at_most=True),
    Goal("call_p50_us", "empty call, p50, us", 1.5, at_most=True, bare="bare_p50_us"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``size_bytes``: of the state. ``seconds``: duration of each kind of call in each round."""

    rounds: int = 3
    size_bytes: int = SIZE
    seconds: float = 1.0
    encrypted: bool = True


def parts(options: Options) -> int:
    return 1 + options.rounds


async def measure(options: Options, report: Callable[[str], None]) -> dict[str, Any]:
    """The object that ``--json`` prints. Raises BenchmarkFailed."""
    described = await machine.describe()
    reason = namespaces.missing()
    with (
        namespaces.two_hosts() as hosts,
        TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as base,
    ):
        report("starting")
        async with _sides(hosts, Path(base), options) as (owner, readers):
            addresses = await owner.ask("serve")
            for _ in range(2):  # memory for two versions on each side, and that of each reader
                await _get(owner, readers, 1)
            rounds = []
            for number in range(1, options.rounds + 1):
                report(f"round {number} of {options.rounds}")
                rounds.append(await _round(hosts[0], owner, readers, addresses, options))
    figures = medians(rounds)
    return result_of(
        options,
        figures,
        GOALS,
        described,
        rounds={key: [rounded(of_round[key]) for of_round in rounds] for key in figures},
        network="two network namespaces" if reason is None else f"loopback, without namespaces: {reason}",
    )


def tables(console: Console, result: Mapping[str, Any]) -> None:
    size = f"{result['settings']['size_bytes'] >> 20} MiB"
    console.print(goals_table(f"between hosts, states of {size}", result["goals"]))
    console.print(
        Text(f"{result['network']}; {compact(result['get_gb_s'])} GB/s, bare {compact(result['bare_gb_s'])}")
    )
    warn_if_busy(console, result)


async def _round(
    near: Host, owner: "_Side", readers: list["_Side"], addresses: dict[str, Any], options: Options
) -> dict[str, float]:
    first = readers[0]
    bare, bare_cpu_s = min([await _bare(near, owner, first, addresses["bytes"], count) for count in (1, 4)])
    whole = await _get(owner, [first], 1)
    all_four = await _get(owner, readers, 1)
    few = await _get(owner, [first], CHANGED)
    (one_reader,), four, (delta,) = whole.readers, all_four.readers, few.readers
    one_copy = await first.ask("copy")
    copies = await asyncio.gather(*(reader.ask("copy") for reader in readers))
    more_s = max(0.0, max(copy["seconds"] for copy in copies) - one_copy["seconds"])
    passes = await first.ask("passes")
    calls = (await first.ask("calls", address=addresses["calls"], seconds=options.seconds))["p50_us"]
    address, public = addresses["bare_calls"]
    bare_calls = await first.ask("bare_calls", address=address, public=public, seconds=options.seconds)
    if sum(reader["got_bytes"] for reader in four) > 1.2 * options.size_bytes:
        raise BenchmarkFailed("a state went over the network more than once for one host")
    four_s = max(reader["seconds"] for reader in four)
    return {
        "bare_gb_s": options.size_bytes / 1e9 / bare,
        "get_gb_s": options.size_bytes / 1e9 / one_reader["seconds"],
        "get_share": bare / one_reader["seconds"],
        "four_s": four_s,
        "one_s": one_reader["seconds"],
        "readers_ratio": four_s / one_reader["seconds"],
        "readers_bound": 1 + more_s / one_reader["seconds"],
        "whole_arrives_s": one_reader["arrived_s"],
        "delta_arrives_s": delta["arrived_s"],
        "delta_ratio": delta["arrived_s"] / one_reader["arrived_s"],
        "delta_get_ratio": delta["seconds"] / one_reader["seconds"],
        "delta_bytes_share": delta["got_bytes"] / options.size_bytes,
        "bare_cpu_s": bare_cpu_s,
        "one_cpu_s": whole.cpu_s,
        "four_cpu_s": all_four.cpu_s,
        "delta_cpu_s": few.cpu_s,
        "whole_arrives_cpu_s": whole.arrived_cpu_s,
        "delta_arrives_cpu_s": few.arrived_cpu_s,
        "set_cpu_s": whole.set_cpu_s,
        "delta_set_cpu_s": few.set_cpu_s,
        "passes_cpu_s": passes["cpu_s"],
        "call_p50_us": calls,
        "bare_p50_us": bare_calls["p50_us"],
        "calls_ratio": calls / bare_calls["p50_us"],
    }


async def _bare(
    near: Host, owner: "_Side", reader: "_Side", port: int, connections: int
) -> tuple[float, float]:
    """Seconds of receiving the state by bare connections, and of the processors of both sides."""
    before = await owner.ask("cpu")
    received = await reader.ask("bare", port=port, address=near.address, connections=connections)
    after = await owner.ask("cpu")
    return received["seconds"], received["cpu_s"] + after["cpu_s"] - before["cpu_s"]


@dataclass(frozen=True, slots=True)
class _Got:
    """A version that was set, and got by ``readers``: their results. The seconds are the processors'."""

    readers: list[dict[str, Any]]
    set_cpu_s: float
    owner_cpu_s: float

    @property
    def cpu_s(self) -> float:
        return self.owner_cpu_s + sum(float(reader["cpu_s"]) for reader in self.readers)

    @property
    def arrived_cpu_s(self) -> float:
        return self.owner_cpu_s + sum(float(reader["arrived_cpu_s"]) for reader in self.readers)


async def _get(owner: "_Side", readers: list["_Side"], share: float) -> _Got:
    """Sets a version, of which that share of the values is new, and gets it by all ``readers`` at once."""
    expected = await owner.ask("change", share=share)
    expected |= await owner.ask("set")
    set_cpu_s = expected.pop("set_cpu_s")
    before = await owner.ask("cpu")
    got = list(await asyncio.gather(*(reader.ask("get", **expected) for reader in readers)))
    after = await owner.ask("cpu")
    return _Got(got, set_cpu_s, after["cpu_s"] - before["cpu_s"])


@asynccontextmanager
async def _sides(
    hosts: tuple[Host, Host], base: Path, options: Options
) -> AsyncIterator[tuple["_Side", list["_Side"]]]:
    """The owner on the first host, and the readers on the second."""
    Keys.make().save(base / "keys")
    async with AsyncExitStack() as stack:
        sides = []
        for host in (hosts[0], *[hosts[1]] * READERS):
            directory = base / host.name
            directory.mkdir(mode=0o700, exist_ok=True)
            sides.append(await stack.enter_async_context(_Side(host, directory, base / "keys", options)))
        yield sides[0], sides[1:]


class _Side:
    """One process of ``network_peer.py``."""

    def __init__(self, host: Host, directory: Path, keys: Path, options: Options) -> None:
        self._host = host
        self._settings = {
            "directory": str(directory), "host": host.address, "keys": str(keys),
            "size_bytes": options.size_bytes, "encrypted": options.encrypted,
        }  # fmt: skip

    async def __aenter__(self) -> "_Side":
        self._process = await asyncio.create_subprocess_exec(
            *self._host.command, sys.executable, "-P", "-m", "flexmarl.launch.bench.network_peer",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=env.actor_environment(),
            start_new_session=True, limit=1 << 24,
        )  # fmt: skip
        self._write(self._settings)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self._process.wait()
        except TimeoutError:
            os.killpg(self._process.pid, 9)
            await self._process.wait()

    async def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Raises BenchmarkFailed if the process has ended."""
        self._write({"do": command, **arguments})
        assert self._process.stdout is not None, "it is a pipe"
        async with asyncio.timeout(_PATIENCE_S):
            line = await self._process.stdout.readline()
        if not line:
            raise BenchmarkFailed(
                f"a process on {self._host.name} ended in {command!r}; see its output above"
            )
        result: dict[str, Any] = json.loads(line)
        return result

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
