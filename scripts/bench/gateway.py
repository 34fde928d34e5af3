"""Measures what a gateway costs a program's calls, and how many sessions and calls it serves at once.

A server in a process of its own has sessions whose agents answer with 1 KiB by a run's simulated engine, which is in
that process too; clients are in this one. The keys:

    direct_turn_ms, gateway_turn_ms    a turn of the agent, and a call one after another that has one; the mean without
                                       the longest tenth
    cost_ms                            their difference, the gateway's and the client's
    echo_ms                            a call to a server on the same libraries that does nothing, one after another
    first_token_ms                     from the engine's first token until a streaming client has it, the median; a
                                       token comes each millisecond
    calls_per_s, echo_calls_per_s      calls for each second of the server's processor time, 64 at once; without that of
                                       the engine, which is another process's in a run
    engine_cpu_ms                      processor time of the engine for a call
    sessions                           sessions with a call under way at once, each with a conversation of three turns
    merged_share                       of the turns behind the first: those that continue the turn before, by its tokens
    goals                              the goal of each figure, and if it is met

Also: ``machine``, ``versions``, ``settings``. Processor time, and not the clock, divides calls: the clients take the
rest of a machine of two cores, and a figure by the clock would be theirs.
"""

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of

from .gateway_server import AGENT, PACED, PROMPT, Place, Usage, pause, serve_sessions, typical_ms

_ROUND_S: Final = 300.0
_AT_ONCE: Final = 64
_TURNS: Final = 3
_STREAM_TOKENS: Final = 64
_LEAST_CPU_S: Final = 1e-6  # of few samples the engine's may be more than that of calls

GOALS: Final = (
    Goal("cost_ms", "the gateway's cost of a call, ms", 2, at_most=True),
    Goal("first_token_ms", "the first text of a stream, later than the engine's, ms", 5, at_most=True),
    Goal("calls_per_s", "calls for each second of one core", 1500, at_most=False),
    Goal("sessions", "sessions at once", 1000, at_most=False),
    Goal("merged_share", "turns that continue the turn before", 1, at_most=False),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``turn_s``: of the agents of the many sessions. ``samples``: calls one after another. ``calls``: at full load."""

    sessions: int = 1000
    samples: int = 500
    calls: int = 6000
    turn_s: float = 2.0


async def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    report("how busy the machine is with other things")
    described = await machine.describe()
    async with asyncio.timeout(_ROUND_S):
        report("calls one after another, and at full load")
        figures = await _calls(options)
        report(f"{options.sessions} sessions at once")
        figures |= await _sessions(options)
    return result_of(options, figures, GOALS, described)


@dataclass(frozen=True, slots=True)
class _Server:
    place: Place
    pipe: Any

    def usage(self) -> Usage:
        self.pipe.send(None)
        usage: Usage = self.pipe.recv()
        return usage


@asynccontextmanager
async def _server(sessions: int, turn_s: float, samples: int) -> AsyncIterator[_Server]:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve_sessions, args=(other, sessions, turn_s, samples), daemon=True)
    process.start()
    other.close()
    try:
        yield _Server(await asyncio.to_thread(pipe.recv), pipe)
    finally:
        pipe.close()
        await asyncio.to_thread(process.join, _ROUND_S)


async def _calls(options: Options) -> dict[str, float]:
    async with _server(_AT_ONCE, 0.0, options.samples) as server:
        place, engine_s = server.place, server.place.direct_cpu_s
        call = _body(AGENT, PROMPT)
        stream = _body(PACED, PROMPT, stream=True, max_tokens=_STREAM_TOKENS)
        async with _connected(place.address, place.keys[0]) as connection:
            gateway_ms = await _turn_ms(connection, call, options.samples)
            first_ms = await _first_token_ms(server, connection, stream, max(1, options.samples // 4))
        async with _connected(place.echo, "") as connection:
            echo_ms = await _turn_ms(connection, call, options.samples)
        return {
            "direct_turn_ms": place.direct_ms,
            "gateway_turn_ms": gateway_ms,
            "cost_ms": gateway_ms - place.direct_ms,
            "echo_ms": echo_ms,
            "first_token_ms": first_ms,
            "calls_per_s": 1
            / max(_LEAST_CPU_S, await _call_cpu_s(server, place.address, call, options) - engine_s),
            "echo_calls_per_s": 1 / await _call_cpu_s(server, place.echo, call, options),
            "engine_cpu_ms": 1e3 * engine_s,
        }


async def _sessions(options: Options) -> dict[str, float]:
    """Conversations of all sessions: each call of a turn begins when all sessions have had the one before."""
    async with _server(options.sessions, options.turn_s, 1) as server:
        open_calls = most = 0

        async def converse(key: str, all_begun: asyncio.Barrier) -> None:
            nonlocal open_calls, most
            messages = [{"role": "user", "content": f"go {key}"}]
            async with _connected(server.place.address, key) as connection:
                for _ in range(_TURNS):
                    await all_begun.wait()
                    open_calls += 1
                    most = max(most, open_calls)
                    answer = json.loads(await connection.ask(_body(AGENT, messages)))
                    open_calls -= 1
                    messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]

        all_begun = asyncio.Barrier(options.sessions)
        async with asyncio.TaskGroup() as tasks:
            for key in server.place.keys:
                tasks.create_task(converse(key, all_begun))
        counts = server.usage().counts
        later = options.sessions * (_TURNS - 1)
        return {"sessions": most, "merged_share": counts["merged"] / later}


def _body(model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> bytes:
    return json.dumps({"model": model, "messages": messages, **options}).encode()


class _Connection:
    """A connection that is kept. No client library: it would be most of a call's time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self._reader = reader
        self._writer = writer
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        )

    async def ask(self, body: bytes) -> bytes:
        """The body of a whole answer."""
        self._send(body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the gateway has refused a call: {head.decode()}")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return await self._reader.readexactly(length)

    async def first_text_s(self, body: bytes) -> float:
        """The time at which the first text of a stream is here."""
        self._send(body)
        content, arrived_s = b"", 0.0
        while b"data: [DONE]" not in content or not content.endswith(b"0\r\n\r\n"):
            content += await self._reader.read(1 << 16)
            if not arrived_s and b'{"content":"' in content.replace(b'"content":""', b""):
                arrived_s = time.monotonic()
        return arrived_s

    def _send(self, body: bytes) -> None:
        self._writer.write(f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)


@asynccontextmanager
async def _connected(address: str, key: str) -> AsyncIterator[_Connection]:
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield _Connection(reader, writer, key)
    finally:
        writer.close()


async def _turn_ms(connection: _Connection, body: bytes, samples: int) -> float:
    times = []
    for _ in range(samples):
        pause()
        began = time.perf_counter()
        await connection.ask(body)
        times.append(1e3 * (time.perf_counter() - began))
    return typical_ms(times)


async def _first_token_ms(server: _Server, connection: _Connection, body: bytes, samples: int) -> float:
    arrived_s = [await connection.first_text_s(body) for _ in range(samples)]
    told_s = server.usage().first_s
    return statistics.median(1e3 * (here - there) for there, here in zip(told_s, arrived_s, strict=True))


async def _call_cpu_s(server: _Server, address: str, body: bytes, options: Options) -> float:
    """The server's processor time for a call, from as many connections as there are sessions."""
    keys = server.place.keys
    each = max(1, options.calls // len(keys))

    async def ask(key: str) -> None:
        async with _connected(address, key) as connection:
            for _ in range(each):
                await connection.ask(body)

    before_s = server.usage().cpu_s
    async with asyncio.TaskGroup() as tasks:
        for key in keys:
            tasks.create_task(ask(key))
    return (server.usage().cpu_s - before_s) / (each * len(keys))


def tables(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the figures."""
    console.print(goals_table("a gateway, simulated agents with answers of 1 KiB", result["goals"]))
    console.print(
        Text(
            f"a turn: {result['direct_turn_ms']:.3g} ms, through the gateway {result['gateway_turn_ms']:.3g} ms; a "
            f"server that does nothing: {result['echo_ms']:.3g} ms, {result['echo_calls_per_s']:,.0f} calls/s"
        )
    )
    warn_if_busy(console, result)


@click.command()
@click.option("--sessions", type=click.IntRange(1), help="Sessions at once. Default: 1000, 50 with --quick.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--quick", is_flag=True, help="A first look in a few seconds; not for comparisons.")
def gateway(as_json: bool, sessions: int | None, quick: bool) -> int:
    """Measure what a gateway costs a program's calls, and how many it serves.

    \b
    Examples:
      scripts/bench/run gateway
      scripts/bench/run gateway --json > gateway.json
      scripts/bench/run gateway --quick

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    few = {"samples": 50, "calls": 640, "turn_s": 0.5} if quick else {}
    options = Options(sessions=sessions or (50 if quick else 1000), **few)  # type: ignore[arg-type]
    return run_benchmark(partial(measure, options), 2, tables, as_json)
