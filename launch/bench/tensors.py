"""``flexmarl bench tensors``: Set and Get of states between two processes of this host, the digest checked.

Everything is compared with one thread's copy between two warm buffers, in the same process and round.

The keys of the result, for the smaller size; ``by_size`` has them for every size, in bytes:

    memcpy_gb_s             the copy of one thread, the slower of both processes
    set_gb_s, get_gb_s      into memory that exists
    first_set_gb_s          of a key that was never set, into memory that was reserved before
    cold_set_gb_s           the same without reserved memory: the system has to find and clear it
    mapped_get_ms           until the tensors can be read in place
    small_tensors_ratio     time of Set and Get of 400 tensors / of one tensor of their sum
    rounds, by_size, goals, machine, settings
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console

from ...core.ref import ActorRef
from ...core.system import ActorSystem
from ..hosts import env
from . import machine
from .goals import Goal, judge
from .measure import medians, rounded
from .result_tables import goals_table, warn_if_busy
from .tensor_actors import TensorGetter, TensorSetter

SIZES: Final = (256 << 20, 1 << 30)
_SMALL_TENSORS = 400
_REPEATED = 3
_TIMEOUT_S = 600.0
_MEMCPY = {"bare": "memcpy_gb_s", "bare_words": "memcpy"}

GOALS = (
    Goal("set_gb_s", "Set, GB/s", 0.9, at_most=False, **_MEMCPY),
    Goal("get_gb_s", "Get into tensors that exist, GB/s", 0.9, at_most=False, **_MEMCPY),
    Goal("first_set_gb_s", "first Set of a key, GB/s", 0.5, at_most=False, **_MEMCPY),
    Goal("mapped_get_ms", "Get in place, ms", 5, at_most=True),
    Goal("small_tensors_ratio", "400 tensors against one of their sum, ratio", 1.2, at_most=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``sizes``: of the states, in bytes."""

    rounds: int = 5
    sizes: tuple[int, ...] = SIZES


def parts(options: Options) -> int:
    return options.rounds * len(options.sizes)


async def measure(options: Options, report: Callable[[str], None]) -> dict[str, Any]:
    """The object that ``--json`` prints. Raises BenchmarkFailed."""
    described = await machine.describe()
    rounds: dict[int, list[dict[str, float]]] = {size: [] for size in options.sizes}
    with TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as runtime_dir:
        async with ActorSystem("bench", Path(runtime_dir)) as system:
            kwargs = {"runtime_dir": runtime_dir}
            setter = await system.spawn(TensorSetter, "setter", kwargs, process=True)
            getter = await system.spawn(TensorGetter, "getter", kwargs, process=True)
            for size in options.sizes:
                for number in range(1, options.rounds + 1):
                    report(f"{size >> 20} MiB, round {number} of {options.rounds}")
                    rounds[size].append(await _round(setter, getter, size))
    figures = {size: medians(measured) for size, measured in rounds.items()}
    by_size = {
        str(size): {
            **{key: rounded(value) for key, value in figures[size].items()},
            "rounds": {key: [rounded(of_round[key]) for of_round in rounds[size]] for key in figures[size]},
            "goals": [asdict(verdict) for verdict in judge(GOALS, figures[size])],
        }
        for size in options.sizes
    }
    return {
        **by_size[str(min(options.sizes))],
        "by_size": by_size,
        "machine": described,
        "settings": asdict(options),
    }


def tables(console: Console, result: Mapping[str, Any]) -> None:
    for size, figures in result["by_size"].items():
        console.print(goals_table(f"states of {int(size) >> 20} MiB", figures["goals"], "memcpy"))
    warn_if_busy(console, result)


async def _round(
    setter: ActorRef[TensorSetter], getter: ActorRef[TensorGetter], size: int
) -> dict[str, float]:
    copies = [await setter.within(_TIMEOUT_S).copy(size), await getter.within(_TIMEOUT_S).copy(size)]
    set_s, get_s = await _set_and_get(setter, getter, size, 1)
    first_set_s = await setter.within(_TIMEOUT_S).first_set(reserved=True)
    cold_set_s = await setter.within(_TIMEOUT_S).first_set(reserved=False)
    handle, _ = await setter.within(_TIMEOUT_S).set()
    mapped_s = [await getter.within(_TIMEOUT_S).mapped(handle) for _ in range(_REPEATED)]
    many_s = sum(await _set_and_get(setter, getter, size, _SMALL_TENSORS))
    gigabytes = size / 1e9
    return {
        "memcpy_gb_s": gigabytes / max(copies),
        "set_gb_s": gigabytes / set_s,
        "get_gb_s": gigabytes / get_s,
        "first_set_gb_s": gigabytes / first_set_s,
        "cold_set_gb_s": gigabytes / cold_set_s,
        "mapped_get_ms": statistics.median(mapped_s) * 1e3,
        "small_tensors_ratio": many_s / (set_s + get_s),
    }


async def _set_and_get(
    setter: ActorRef[TensorSetter], getter: ActorRef[TensorGetter], size: int, tensors: int
) -> tuple[float, float]:
    """Seconds of a Set and of a Get, the shortest of a few: both after others of the same size."""
    await asyncio.gather(*(actor.within(_TIMEOUT_S).prepare(size, tensors) for actor in (setter, getter)))
    sets, gets = [], []
    for _ in range(2 + _REPEATED):  # a state has two places in memory: after two Sets both exist
        handle, set_s = await setter.within(_TIMEOUT_S).set()
        sets.append(set_s)
        gets.append(await getter.within(_TIMEOUT_S).get(handle))
    return min(sets[2:]), min(gets[2:])
