"""Measures reading: the listing of 100,000 samples, and the cost that recording adds to a step.

\b
Examples:
  scripts/bench/run samples list
  scripts/bench/run samples step --pairs 10
  scripts/bench/run samples step --without samples.trainer_logprobs=0
  scripts/bench/run samples step --than ../flexmarl-before/.venv/bin/flexmarl

``step`` compares two runs that share the machine at the same time, so that what else it does disturbs both: the mean
time of a step, and its CPU time, user and system, of all processes of the run, while both train. It reports the medians
of the pairs' ratios. Goals: a listing or a filter takes less than 1 s, a step less than 2 % more.
"""

import json
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import RecordedTrajectory, RecordedTurn, compress_record, pack_record
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.samples.reader import Samples
from flexmarl.launch.run_folder.samples.sample_file import SampleFile
from flexmarl.launch.run_folder.samples.showing import as_object

from .paired_runs import Side, paired_steps

_TRAJECTORIES = 8
_TURNS = 2
_WITHOUT = "samples.steps=0"


def group(step: int, query: int, rng: random.Random) -> list[RecordedTrajectory]:
    """Two turns of 64 tokens each."""
    question = Query(f"q{query:06}", f"{query} + {rng.randrange(1000)}")
    trajectories = []
    for number in range(_TRAJECTORIES):
        turns = []
        for turn in range(_TURNS):
            tokens = tuple(rng.choices(range(50_000), k=64))
            logprobs = tuple(-rng.expovariate(1) for _ in tokens)
            text = " ".join(rng.choices(("the", "answer", "is", "not", "7", "so"), k=64))
            reward = rng.random()
            prompt = (question.text,) if turn == 0 else (0, "check it")
            name = ("solver", "checker")[turn]
            turns.append(
                RecordedTurn(
                    turn, name, prompt, text, 64, tokens, logprobs, step, "stop", reward, reward - 0.5
                )
            )
        rewards = {turn.agent: turn.reward or 0.0 for turn in turns}
        trajectories.append(RecordedTrajectory(step, False, question, number, rewards, {}, "", tuple(turns)))
    return trajectories


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def listing(samples: int) -> dict[str, float]:
    """Seconds of each query, the best of three, and sizes."""
    rng = random.Random(1)
    groups = samples // (_TRAJECTORIES * _TURNS)
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory.create(Path(folder) / "run", "{}")
        file = SampleFile(directory.samples, 1 << 30, 1 << 40)
        lines = Path(folder) / "samples.jsonl.z"
        pack = zlib.compressobj(1)
        wrote_s = 0.0
        with lines.open("wb") as plain:
            for number in range(groups):
                trajectories = group(1 + number // 128, number, rng)
                began = time.perf_counter()
                file.add([compress_record(pack_record(trajectories))])
                wrote_s += time.perf_counter() - began
                for trajectory in trajectories:
                    line = json.dumps(as_object(trajectory, tokens=True)) + "\n"
                    plain.write(pack.compress(line.encode()))
            plain.write(pack.flush())
        file.close()
        figures = _queries(directory.path)
        figures["of JSON lines: reward < 0.01, s"] = seconds(lambda: _filtered_lines(lines))
        figures["samples"] = groups * _TRAJECTORIES * _TURNS
        figures["written, us a group"] = 1e6 * wrote_s / groups
        figures["sqlite, MiB"] = directory.samples.stat().st_size / 2**20
        figures["JSON lines, MiB"] = lines.stat().st_size / 2**20
    return figures


def _queries(run: Path) -> dict[str, float]:
    """Each opens the file, as a command does: the first query reads the rows of all records."""
    queries: dict[str, Callable[[Samples], Any]] = {
        "all rows listed, s": lambda samples: samples.rows(),
        "rows: agent, reward < 0.01, s": lambda samples: samples.rows(agent="checker", reward="<0.01"),
        "rows: step, s": lambda samples: samples.rows(step=3),
        "count: agent, reward < 0.01, s": lambda samples: samples.count(agent="checker", reward="<0.01"),
        "5 newest trajectories, s": lambda samples: samples.trajectories(order="newest", limit=5),
        "10 worst of an agent, s": lambda samples: samples.trajectories(
            order="worst", agent="solver", limit=10
        ),
        "query text, s": lambda samples: samples.trajectories(query="77 + ", limit=10),
    }

    def opened(work: Callable[[Samples], Any]) -> None:
        with Samples(run) as samples:
            work(samples)

    return {name: min(seconds(partial(opened, work)) for _ in range(3)) for name, work in queries.items()}


def _filtered_lines(path: Path) -> list[Any]:
    lines = zlib.decompress(path.read_bytes()).splitlines()
    return [
        trajectory
        for line in lines
        for trajectory in [json.loads(line)]
        if any(turn["reward"] < 0.01 for turn in trajectory["turns"])
    ]


@click.group(help=__doc__)
def samples() -> None: ...


@samples.command("list")
@click.option("--samples", "count", type=click.IntRange(1), default=100_000, show_default=True)
def list_samples(count: int) -> None:
    """Listing and filters, against compressed lines of JSON."""
    _print(listing(count))


@samples.command()
@click.option("--pairs", type=click.IntRange(1), default=10, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=120, show_default=True, help="Steps of each run.")
@click.option("--than", default="", metavar="PROGRAM", help="Compare with the flexmarl of another version.")
@click.option(
    "--without", default=_WITHOUT, metavar="KEY=VALUE", show_default=True, help="Of the cheaper runs."
)
def step(pairs: int, steps: int, than: str, without: str) -> None:
    """Paired runs of sort-digits, with and without recording or a part of it, or of this version and another one."""
    if than and without != _WITHOUT:
        raise click.UsageError("--than compares runs with the same settings: leave out --without")
    _print(paired_steps(pairs, steps, Side(), Side(program=than) if than else Side((without,))))


def _print(figures: Mapping[str, Any]) -> None:
    for name, value in figures.items():
        print(f"{name:<36} {value if isinstance(value, list) else round(value, 4)}")
