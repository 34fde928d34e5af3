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
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import psutil

from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import RecordedTrajectory, RecordedTurn, compress_record, pack_record
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.samples.reader import Samples
from flexmarl.launch.run_folder.samples.sample_file import SampleFile
from flexmarl.launch.run_folder.samples.showing import as_object

_TRAJECTORIES = 8
_TURNS = 2
_WARM_UP = 10
_CPU = "cpu_s/"
_LOOK_S = 0.01
_LONGEST_S = 600.0
_WITHOUT = "samples.steps=0"
_WORDS = ("agent_defaults.sft.batches=20", "evaluation.every=0", "data.eval_problems=8")


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


def paired_steps(
    pairs: int,
    steps: int,
    other: str,
    without: str = _WITHOUT,
    recipe: Sequence[str] = ("sort-digits", *_WORDS),
) -> dict[str, Any]:
    """Ratios of the time and CPU time of a step: recorded / not recorded, or of this version / of ``other``.
    ``without``: the setting of runs that leave out what is measured. ``recipe``: its name or path, and settings."""
    program = str(Path(sys.executable).with_name("flexmarl"))
    sides = [(program, ()), (other, ())] if other else [(program, ()), (program, (without,))]
    figures: dict[str, Any] = {}
    means = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            runs = [
                _RunBeside(
                    Path(folder), f"{pair}-{side}", command, (*recipe, f"training.steps={steps}", *words)
                )
                for side, (command, words) in enumerate(sides)
            ]
            for run in runs if pair % 2 else reversed(runs):
                run.start()
            means.append(_beside_each_other(runs, steps))
            print(
                *(f"{step.time_s:.3f} s, CPU {step.cpu_s:.4f} s" for step in means[-1]),
                sep="; ",
                file=sys.stderr,
            )
    measures: dict[str, Callable[[_Step], float]] = {
        "time": lambda step: step.time_s,
        "CPU time": lambda step: step.cpu_s,
    }
    for name, measure in measures.items():
        ratios = sorted(measure(with_it) / measure(without_it) for with_it, without_it in means)
        figures[f"{name}, ratio"] = statistics.median(ratios)
        figures[f"{name}, of each pair"] = [round(ratio, 4) for ratio in ratios]
        figures[f"{name} of a step, s"] = statistics.median(measure(without_it) for _, without_it in means)
    more = {
        process: statistics.median(
            1e3 * (with_it.cpu_s_by[process] - without_it.cpu_s_by.get(process, 0.0))
            for with_it, without_it in means
        )
        for process in means[0][0].cpu_s_by
    }
    return figures | {f"CPU time more, ms: {process}": value for process, value in more.items()}


@dataclass(frozen=True, slots=True)
class _Step:
    """Means over the steps of a run. ``cpu_s``: of all its processes; ``cpu_s_by``: by actor, from its metrics."""

    time_s: float
    cpu_s: float
    cpu_s_by: dict[str, float]


class _RunBeside:
    """A run in processes of its own. ``words``: its recipe and settings."""

    def __init__(self, runs: Path, name: str, command: str, words: Sequence[str]) -> None:
        self._command = (
            command,
            "train",
            "--runs",
            str(runs),
            "--name",
            name,
            "-q",
            *words,
        )
        self._metrics = runs / name / "metrics.jsonl"
        self._used_s: dict[psutil.Process, float] = {}
        """CPU time of each process, as it was read last: a short one may have ended."""
        self._began: tuple[int, float, float] | None = None
        self._now = (0, 0.0, 0.0)

    def start(self) -> None:
        self._process = psutil.Popen(self._command, stdout=subprocess.DEVNULL)

    def read(self) -> int:
        """The number of steps that have ended. Notes the time and the CPU time of each."""
        steps = self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0
        if steps > self._now[0] and steps >= _WARM_UP:
            if self._began is None:
                self._used_s = dict.fromkeys([self._process, *self._process.children(recursive=True)], 0.0)
            for process in self._used_s:
                with suppress(psutil.NoSuchProcess):
                    self._used_s[process] = sum(process.cpu_times()[:2])
            self._now = (steps, time.perf_counter(), sum(self._used_s.values()))
            self._began = self._began or self._now
        if self._process.poll() not in (None, 0):
            raise RuntimeError(f"{' '.join(self._command)} has failed")
        return steps

    def end(self) -> _Step:
        assert self._process.wait(_LONGEST_S) == 0
        assert self._began is not None
        (first, began_s, used_s), (last, ended_s, all_s) = self._began, self._now
        steps = last - first
        return _Step((ended_s - began_s) / steps, (all_s - used_s) / steps, self._cpu_by_actor())

    def _cpu_by_actor(self) -> dict[str, float]:
        """A step's, between the first and the last reading: a figure is read once a second, and stays until then."""
        cpu_s = {}
        lines = [json.loads(line) for line in self._metrics.read_text().splitlines()][_WARM_UP:]
        for key in (key for key in lines[-1] if key.startswith(_CPU)):
            readings = [
                (line["step"], line[key])
                for before, line in pairwise(lines)
                if key in before and line[key] != before[key]
            ]
            if len(readings) > 1:
                (first, at_first), (last, at_last) = readings[0], readings[-1]
                cpu_s[key.removeprefix(_CPU)] = (at_last - at_first) / (last - first)
        return cpu_s


def _beside_each_other(runs: Sequence[_RunBeside], steps: int) -> list[_Step]:
    """Counts while both run: then both have the same troubles."""
    deadline_s = time.monotonic() + _LONGEST_S
    while max([run.read() for run in runs]) < steps - 1:
        assert time.monotonic() < deadline_s, "the runs hang"
        time.sleep(_LOOK_S)
    return [run.end() for run in runs]


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
    _print(paired_steps(pairs, steps, than, without))


def _print(figures: Mapping[str, Any]) -> None:
    for name, value in figures.items():
        print(f"{name:<36} {value if isinstance(value, list) else round(value, 4)}")
