"""Measures how long people wait for answers whose rewards come late, while a run trains under ``async``.

A run of ``flexmarl train`` on ``chats_recipe``, every actor in a process of its own; engine and trainer are simulated.
A program beside it submits chats at random times, and rewards each after another random time. The keys:

    p50_ms, p99_ms, max_ms    by how much an answer is later than its engine's time, which the workflow measures
    late                      trajectories of chats that no step could train, with the reasons in ``reasons``
    trained                   trajectories of chats that were trained
    twice, unaccounted        trajectories of chats that were trained twice; that were neither trained nor late
    steps                     steps that were complete between the first answer and the last reward
    goals                     the goal of each figure, and if it is met

Also: ``machine``, ``versions``, ``settings``. Rewards that come after more versions than ``max_staleness`` are late.
"""

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

import flexmarl
from flexmarl.actors.messages import Query, QueryAnswer
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.run.connected_run import ConnectedRun
from flexmarl.launch.run_folder.json_lines import read_lines

RECIPE: Final = Path(__file__).parent / "chats_recipe"
AGENT: Final = "assistant"
_START_S: Final = 120.0
_ROUND_S: Final = 600.0

GOALS: Final = (
    Goal("max_ms", "the latest answer, after its engine's time, ms", 50, at_most=True),
    Goal("twice", "trajectories trained twice", 0, at_most=True),
    Goal("unaccounted", "trajectories neither trained nor late", 0, at_most=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``reward_s``: the longest time until a reward. ``spread_s``: chats begin within this time. ``overrides``: of the
    recipe's config."""

    chats: int = 64
    reward_s: float = 30.0
    spread_s: float = 10.0
    seed: int = 0
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chat:
    """``over_s``: by how much its answer was later than its engine's time. ``samples``: their names."""

    over_s: float
    samples: tuple[str, ...]


async def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    report("how busy the machine is with other things")
    described = await machine.describe()
    report(f"{options.chats} chats, with rewards after 0 to {options.reward_s:g} s")
    with tempfile.TemporaryDirectory() as folder:
        async with asyncio.timeout(_ROUND_S):
            figures, reasons = await _of_run(options, Path(folder))
    return result_of(options, figures, GOALS, described, reasons=reasons)


async def _of_run(options: Options, folder: Path) -> tuple[dict[str, float], dict[str, int]]:
    async with (
        flexmarl.Run(str(RECIPE), settings=options.overrides, runs=folder, name="chats") as run,
        flexmarl.connect(run.directory.path, wait_s=_START_S) as program,
    ):
        drawn = asyncio.create_task(_reward_drawn(program))
        steps = program.steps()
        first = await anext(steps)
        draws = random.Random(options.seed)
        plans = [
            (draws.uniform(0, options.spread_s), draws.uniform(0, options.reward_s))
            for _ in range(options.chats)
        ]
        chats = await asyncio.gather(
            *(_chat(program, f"chat-{number}", *plan) for number, plan in enumerate(plans))
        )
        last = await anext(program.steps())
        await anext(program.steps())  # the samples of the last rewards are in a step by now
        await run.stop()
        drawn.cancel()
        await asyncio.gather(drawn, return_exceptions=True)
        figures = _figures(chats, run.directory.path) | {"steps": last.step - first.step}
        return figures, _reasons(run.directory.path)


async def _reward_drawn(program: ConnectedRun) -> None:
    """Rewards the drawn queries at once."""
    async for samples in program.unjudged(AGENT):
        rewards = {
            name: float(len(text) % 2)
            for name, text in zip(samples["sample_id"], samples["text"], strict=True)
            if ":drawn-" in name
        }
        if rewards:
            await program.write(AGENT, {"sample_id": [*rewards], "reward": [*rewards.values()]})


async def _chat(program: ConnectedRun, name: str, begins_s: float, reward_s: float) -> Chat:
    """One person: asks after ``begins_s``, and rewards the answers ``reward_s`` after they have come."""
    await asyncio.sleep(begins_s)
    began = time.monotonic()
    (answer,) = await program.submit([Query(name, "Hello! ")], judged=False)
    took_s = time.monotonic() - began
    names = _samples(answer)
    rows = await program.samples(f"query = '{name}'")
    engine_s = max(float(row["engine_s"]) for row in rows)
    await asyncio.sleep(reward_s)
    await program.write(AGENT, {"sample_id": names, "reward": [float(n % 2) for n in range(len(names))]})
    return Chat(took_s - engine_s, tuple(names))


def _samples(answer: QueryAnswer) -> list[str]:
    return [turn.sample_id for trajectory in answer.trajectories for turn in trajectory.turns]


def _figures(chats: list[Chat], run: Path) -> dict[str, float]:
    over_ms = sorted(1e3 * chat.over_s for chat in chats)
    newest = max((run / "checkpoints").glob("step_*[0-9]"))
    state = json.loads((newest / AGENT / "simulated_policy.json").read_text())
    counts = Counter(name for names in state["trained"].values() for name in names)
    names = [name for chat in chats for name in chat.samples]
    late = sum(line["trajectories"] for line in _late(run))
    trained = sum(name in counts for name in names)
    return {
        "p50_ms": over_ms[len(over_ms) // 2],
        "p99_ms": over_ms[(99 * len(over_ms) - 1) // 100],
        "max_ms": over_ms[-1],
        "trained": trained,
        "late": late,
        "twice": sum(counts[name] > 1 for name in names),
        "unaccounted": abs(len(names) - trained - late),
    }


def _late(run: Path) -> list[dict[str, Any]]:
    """The events of chats that were late."""
    lines, _ = read_lines(run / "events.jsonl")
    return [line for line in lines if line["event"] == "group_late" and line["query"].startswith("chat-")]


def _reasons(run: Path) -> dict[str, int]:
    return dict(Counter(line["reason"] for line in _late(run)))


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table("chats beside a run, simulated engine", result["goals"]))
    console.print(
        Text(
            f"after the engine's time: p50 {result['p50_ms']:.1f} ms, p99 {result['p99_ms']:.1f} ms; trajectories: "
            f"{result['trained']} trained, {result['late']} late; {result['steps']} steps meanwhile"
        )
    )
    warn_if_busy(console, result)


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option("--chats", type=click.IntRange(1), help="Chats. Default: 64, 8 with --quick.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all times.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--quick", is_flag=True, help="A first look in a quarter of a minute; not for comparisons.")
def chats(overrides: tuple[str, ...], as_json: bool, chats: int | None, seed: int, quick: bool) -> int:
    """Measure how long people wait for answers whose rewards come late, while a run trains.

    A real run under async, with a simulated engine and trainer, and a program that submits 64 chats and rewards each
    0 to 30 s after its answer.

    \b
    Examples:
      scripts/bench/run chats
      scripts/bench/run chats --json > chats.json
      scripts/bench/run chats --quick

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    times = {"reward_s": 2.0, "spread_s": 1.0} if quick else {}
    options = Options(chats=chats or (8 if quick else 64), seed=seed, overrides=overrides, **times)
    return run_benchmark(partial(measure, options), 2, tables, as_json)
