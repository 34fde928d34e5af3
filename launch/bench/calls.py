"""Measures flexmarl's calls beside the bare ZeroMQ patterns, in the same rounds: ``flexmarl bench calls``.

Ours and the bare pattern take turns within every round, so that other load on the machine affects both. A figure is the
median of the rounds. Each transport is measured in parts, so that only the processes of a part are running:

    calls     measuring process, one actor process, bare peers     latency, calls in flight, one-way messages
    arrays    measuring process, one actor process, a bare peer    256 MiB in one message
    fan-in    measuring process, one actor process, 8 callers      all call the one
    start     measuring process, one actor process                 spawned again for each round; memory and CPU at rest

The keys, under ``ipc`` and ``tcp_curve``; the bare patterns (``bare_zeromq.py``) use the same transport:

    call_p50_us, call_p99_us            an empty call and its reply, one after the other, microseconds
    bare_p50_us, bare_p99_us            the same by REQ/REP
    dict_p50_us, dict_p99_us            a dict of 1 KiB there and back
    bare_dict_p50_us, bare_dict_p99_us  the same by REQ/REP
    calls_per_s                         empty calls, 1000 in flight
    bare_calls_per_s                    the same by DEALER/ROUTER on the file descriptor
    gathered_calls_per_s                ``gather`` of 1000 empty calls, again and again
    gathered_1k_calls_per_s             the same with a dict of 1 KiB there and back
    oneway_per_s                        one-way messages, until the answer that says all have arrived
    best_bare_p50_us                    one call after the other by the best bare design under asyncio
                                        (``joined_zeromq.py``), which joins the messages of a tick
    best_bare_calls_per_s               its ``gather`` of 1000 empty calls
    best_bare_oneway_per_s              its one-way messages
    fan_in_calls_per_s                  empty calls of 8 processes to one actor, 1000 in flight in all
    array_gb_s                          an array in a call until its reply, 10^9 bytes per second
    bare_array_gb_s                     the same by zmq, copy=False, into a prepared buffer
    spawn_first_reply_s                 from ``spawn`` of a process to the first reply, seconds
    idle_rss_mib, idle_cpu_percent      that process at rest; percent of one core
    kill_to_dead_ms                     from its kill -9 until 100 calls to it have raised ActorDead, milliseconds
    rounds                              every round's figures, by key
    goals                               the goal of each figure, and if it is met

Also: ``others`` (None for a library that is not installed; ``others_install`` is the command that installs it),
``machine``, ``versions``, ``settings``. On a busy machine the latencies mean nothing: two processes that share one core
call each other three times as fast as two that wake each other's core from idle, until the core is taken away for
milliseconds.
"""

import statistics
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...core.base.collector import spare_collector
from ...core.ref import ActorRef
from ..hosts import env
from . import flexmarl_calls, machine, other_frameworks
from .array_actor import Sink
from .bare_zeromq import Bare
from .bench_actors import Caller, Echo
from .call_goals import GOALS
from .goals import judge
from .measure import Report, gathered, in_turns, medians, one_after_another, percentile, rounded

Transport = Literal["ipc", "tcp_curve"]
Figures = dict[str, float]

TRANSPORTS: tuple[Transport, ...] = ("ipc", "tcp_curve")
OTHERS = ("ray", "xoscar")

_BOTH = ("ours", "bare")
_BEST = ("ours", "best")
_LATENCY_SLICES = 4
_RATE_SLICES = 2
_ARRAYS_PER_ROUND = 3
# 16 entries, each of about 64 bytes as MessagePack.
_DICT = {f"key-{number:02}": "x" * 56 for number in range(16)}


@dataclass(frozen=True, slots=True)
class Options:
    """``seconds``: duration of each kind of call in each round; an idle process is watched four times as long."""

    transports: tuple[Transport, ...] = TRANSPORTS
    rounds: int = 5
    seconds: float = 0.5
    in_flight: int = 1000
    callers: int = 8
    array_mib: int = 256
    others: bool = True


def parts(options: Options) -> int:
    """The number of calls of ``report`` that ``measure`` makes."""
    return 1 + len(options.transports) * 4 * options.rounds + (len(OTHERS) if options.others else 0)


async def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured.

    Raises BenchmarkFailed if a message is lost or a process does not start, and the error of a failed call.
    """
    environment = env.actor_environment()
    report("how busy the machine is with other things")
    described = await machine.describe()
    spare_collector()  # as actors' processes do
    result: dict[str, Any] = {}
    for transport in options.transports:
        result[transport] = await _measure_transport(transport, options, environment, report)
    result["others"] = {}
    for library in OTHERS if options.others else ():
        report(library)
        result["others"][library] = await other_frameworks.measure(
            library, options.seconds, options.in_flight, environment
        )
    result["others_install"] = other_frameworks.INSTALL
    result["machine"] = described
    result["versions"] = machine.versions()
    result["settings"] = asdict(options)
    return result


async def _measure_transport(
    transport: Transport, options: Options, environment: Mapping[str, str], report: Report
) -> dict[str, Any]:
    curve = transport == "tcp_curve"
    rounds: list[Figures] = [{} for _ in range(options.rounds)]

    async def in_rounds(part: str, figures_of: Callable[[], Awaitable[Figures]]) -> None:
        for number, figures in enumerate(rounds, 1):
            report(f"{transport}: {part}, round {number} of {options.rounds}")
            figures |= await figures_of()

    with tempfile.TemporaryDirectory(prefix="flexmarl-") as directory:  # 0700
        await _calls(Path(directory), curve, options, environment, in_rounds)
        await _arrays(Path(directory), curve, options, environment, in_rounds)
    await _fan_in(curve, options, in_rounds)

    async def start() -> Figures:
        return await flexmarl_calls.start_and_rest(curve=curve, rest_s=4 * options.seconds)

    await in_rounds("start", start)
    figures = medians(rounds)
    by_key = {key: [rounded(round_[key]) for round_ in rounds] for key in figures}
    goals = [asdict(verdict) for verdict in judge(GOALS[transport], figures)]
    return {**{key: rounded(value) for key, value in figures.items()}, "rounds": by_key, "goals": goals}


InRounds = Callable[[str, Callable[[], Awaitable[Figures]]], Awaitable[None]]


async def _calls(
    directory: Path, curve: bool, options: Options, environment: Mapping[str, str], in_rounds: InRounds
) -> None:
    bare_patterns = Bare(directory, ("latency", "calls", "joined"), curve=curve, environment=environment)
    async with bare_patterns as bare, flexmarl_calls.new_system(curve=curve) as system:
        echo = await system.spawn(Echo, "echo", process=True)

        async def one_round(seconds: float = options.seconds) -> Figures:
            return {
                **await _latencies("", None, echo, bare, seconds),
                **await _latencies("dict_", _DICT, echo, bare, seconds),
                **await _rates(echo, bare, seconds, options.in_flight),
                **await _gather_rates(echo, bare, seconds, options.in_flight),
                **await _one_way(echo, bare, seconds),
            }

        await one_round(options.seconds / 5)  # warm-up: connections, caches, memory
        await in_rounds("calls", one_round)


async def _latencies(
    prefix: str, argument: dict[str, str] | None, echo: ActorRef[Echo], bare: Bare, seconds: float
) -> Figures:
    """The best bare design makes empty calls only."""
    contenders = (*_BOTH, "best") if argument is None else _BOTH
    microseconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    slice_s = seconds / _LATENCY_SLICES
    for contender in in_turns(contenders, _LATENCY_SLICES):
        if contender == "ours":
            microseconds[contender] += await flexmarl_calls.latency(echo, argument, slice_s)
        elif contender == "bare":
            microseconds[contender] += await bare.latency(argument, slice_s)
        else:
            microseconds[contender] += await one_after_another(bare.joined.call, slice_s)
    key_prefix = prefix or "call_"
    best = {"best_bare_p50_us": percentile(microseconds["best"], 0.5)} if argument is None else {}
    return {
        f"{key_prefix}p50_us": percentile(microseconds["ours"], 0.5),
        f"{key_prefix}p99_us": percentile(microseconds["ours"], 0.99),
        f"bare_{prefix}p50_us": percentile(microseconds["bare"], 0.5),
        f"bare_{prefix}p99_us": percentile(microseconds["bare"], 0.99),
        **best,
    }


async def _rates(echo: ActorRef[Echo], bare: Bare, seconds: float, in_flight: int) -> Figures:
    per_s: dict[str, list[float]] = {"ours": [], "bare": []}
    slice_s = seconds / _RATE_SLICES
    for contender in in_turns(_BOTH, _RATE_SLICES):
        if contender == "ours":
            per_s[contender].append(await flexmarl_calls.calls_per_s(echo, slice_s, in_flight))
        else:
            per_s[contender].append(await bare.calls_per_s(slice_s, in_flight))
    return {
        "calls_per_s": statistics.mean(per_s["ours"]),
        "bare_calls_per_s": statistics.mean(per_s["bare"]),
    }


async def _gather_rates(echo: ActorRef[Echo], bare: Bare, seconds: float, at_once: int) -> Figures:
    per_s: dict[str, list[float]] = {"ours": [], "best": []}
    slice_s = seconds / _RATE_SLICES
    for contender in in_turns(_BEST, _RATE_SLICES):
        if contender == "ours":
            per_s[contender].append(await flexmarl_calls.gathered_per_s(echo, None, slice_s, at_once))
        else:
            per_s[contender].append(await gathered(bare.joined.call, slice_s, at_once))
    return {
        "gathered_calls_per_s": statistics.mean(per_s["ours"]),
        "best_bare_calls_per_s": statistics.mean(per_s["best"]),
        "gathered_1k_calls_per_s": await flexmarl_calls.gathered_per_s(echo, _DICT, seconds, at_once),
    }


async def _one_way(echo: ActorRef[Echo], bare: Bare, seconds: float) -> Figures:
    per_s: dict[str, list[float]] = {"ours": [], "best": []}
    slice_s = seconds / _RATE_SLICES
    for contender in in_turns(_BEST, _RATE_SLICES):
        if contender == "ours":
            per_s[contender].append(await flexmarl_calls.one_way_per_s(echo, slice_s))
        else:
            per_s[contender].append(await bare.one_way_per_s(slice_s))
    return {
        "oneway_per_s": statistics.mean(per_s["ours"]),
        "best_bare_oneway_per_s": statistics.mean(per_s["best"]),
    }


async def _arrays(
    directory: Path, curve: bool, options: Options, environment: Mapping[str, str], in_rounds: InRounds
) -> None:
    array = np.ones(options.array_mib * 2**20, dtype=np.uint8)
    bare_pattern = Bare(directory, ("array",), curve=curve, environment=environment, array_bytes=array.nbytes)
    async with bare_pattern as bare, flexmarl_calls.new_system(curve=curve) as system:
        sink = await system.spawn(Sink, "sink", process=True)
        stamp = 0

        async def one_round() -> Figures:
            nonlocal stamp
            gb_s: dict[str, list[float]] = {"ours": [], "bare": []}
            for contender in in_turns(_BOTH, _ARRAYS_PER_ROUND):
                stamp = (stamp + 1) % 256
                if contender == "ours":
                    gb_s[contender].append(await flexmarl_calls.array_gb_s(sink, array, stamp))
                else:
                    gb_s[contender].append(await bare.array_gb_s(array, stamp))
            return {
                "array_gb_s": statistics.median(gb_s["ours"]),
                "bare_array_gb_s": statistics.median(gb_s["bare"]),
            }

        await one_round()  # warm-up: faults in the pages
        await in_rounds("arrays", one_round)


async def _fan_in(curve: bool, options: Options, in_rounds: InRounds) -> None:
    async with flexmarl_calls.new_system(curve=curve) as system:
        echo = await system.spawn(Echo, "echo", process=True)
        callers = [
            await system.spawn(Caller, f"caller-{number}", process=True) for number in range(options.callers)
        ]
        in_flight = max(1, options.in_flight // options.callers)

        async def one_round(seconds: float = options.seconds) -> Figures:
            return {
                "fan_in_calls_per_s": await flexmarl_calls.fan_in_calls_per_s(
                    callers, echo, seconds, in_flight
                )
            }

        await one_round(options.seconds / 5)
        await in_rounds("fan-in", one_round)
