"""Measures reading: the listing of 100,000 samples, and the cost that recording adds to a step.

    python scripts/bench/samples.py list [--samples N]      listing and filters, against compressed lines of JSON
    python scripts/bench/samples.py step [--pairs N]        paired runs of sort-digits, with and without recording

``step`` compares two runs, one behind the other and in turns the one or the other first: the mean time of a step, and
its CPU time, user and system, of all processes of the run. It reports the medians of the pairs' ratios. CPU time is the
steadier of the two. Goals: a listing or a filter takes less than 1 s, a step less than 2 % more.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import RecordedTrajectory, RecordedTurn, compressed, packed
from flexmarl.launch.cli import main as flexmarl
from flexmarl.launch.run_directory import RunDirectory
from flexmarl.launch.samples.reader import Samples
from flexmarl.launch.samples.sample_file import SampleFile
from flexmarl.launch.samples.showing import as_object

_TRAJECTORIES = 8
_TURNS = 2
_WARM_UP = 5
_CPU = "cpu_s/"


def group(step: int, query: int, rng: random.Random) -> list[RecordedTrajectory]:
    """Two turns of 64 tokens each."""
    asked = Query(f"q{query:06}", f"{query} + {rng.randrange(1000)}")
    found = []
    for number in range(_TRAJECTORIES):
        turns = []
        for turn in range(_TURNS):
            tokens = tuple(rng.choices(range(50_000), k=64))
            logprobs = tuple(-rng.expovariate(1) for _ in tokens)
            text = " ".join(rng.choices(("the", "answer", "is", "not", "7", "so"), k=64))
            reward = rng.random()
            prompt = (asked.text,) if turn == 0 else (0, "check it")
            name = ("solver", "checker")[turn]
            turns.append(
                RecordedTurn(
                    turn, name, prompt, text, 64, tokens, logprobs, step, "stop", reward, reward - 0.5
                )
            )
        rewards = {turn.agent: turn.reward or 0.0 for turn in turns}
        found.append(RecordedTrajectory(step, False, asked, number, rewards, {}, "", tuple(turns)))
    return found


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
                one = group(1 + number // 128, number, rng)
                began = time.perf_counter()
                file.add([compressed(packed(one))])
                wrote_s += time.perf_counter() - began
                for trajectory in one:
                    line = json.dumps(as_object(trajectory, tokens=True)) + "\n"
                    plain.write(pack.compress(line.encode()))
            plain.write(pack.flush())
        file.close()
        found = _queries(directory.path)
        found["of JSON lines: reward < 0.01, s"] = seconds(lambda: _filtered_lines(lines))
        found["samples"] = groups * _TRAJECTORIES * _TURNS
        found["written, us a group"] = 1e6 * wrote_s / groups
        found["sqlite, MiB"] = directory.samples.stat().st_size / 2**20
        found["JSON lines, MiB"] = lines.stat().st_size / 2**20
    return found


def _queries(run: Path) -> dict[str, float]:
    with Samples(run) as samples:
        queries: dict[str, Callable[[], Any]] = {
            "all rows listed, s": samples.rows,
            "rows: agent, reward < 0.01, s": lambda: samples.rows(agent="checker", reward="<0.01"),
            "rows: step, s": lambda: samples.rows(step=3),
            "count: agent, reward < 0.01, s": lambda: samples.count(agent="checker", reward="<0.01"),
            "5 newest trajectories, s": lambda: samples.trajectories(order="newest", limit=5),
            "10 worst of an agent, s": lambda: samples.trajectories(order="worst", agent="solver", limit=10),
            "query text, s": lambda: samples.trajectories(query="77 + ", limit=10),
        }
        return {name: min(seconds(work) for _ in range(3)) for name, work in queries.items()}


def _filtered_lines(path: Path) -> list[Any]:
    lines = zlib.decompress(path.read_bytes()).splitlines()
    return [
        one
        for line in lines
        for one in [json.loads(line)]
        if any(turn["reward"] < 0.01 for turn in one["turns"])
    ]


def paired_steps(pairs: int, steps: int) -> dict[str, Any]:
    """Ratios of the mean time and CPU time of a step, recorded / not recorded."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        means = []
        for pair in range(pairs):
            order = (0, 50) if pair % 2 else (50, 0)
            means.append({kept: _of_step(Path(folder), f"{pair}-{kept}", kept, steps) for kept in order})
    figures: dict[str, Callable[[_Step], float]] = {
        "time": lambda step: step.time_s,
        "CPU time": lambda step: sum(step.cpu_s.values()),
    }
    for name, of in figures.items():
        ratios = [of(mean[50]) / of(mean[0]) for mean in means]
        found[f"{name}, recorded / not"] = statistics.median(ratios)
        found[f"{name}, of each pair"] = [round(ratio, 4) for ratio in sorted(ratios)]
        found[f"{name} of a step, s"] = statistics.median(of(mean[0]) for mean in means)
    more = {
        process: statistics.median(
            1e3 * (mean[50].cpu_s.get(process, 0.0) - mean[0].cpu_s.get(process, 0.0)) for mean in means
        )
        for process in means[0][50].cpu_s
    }
    return found | {f"CPU time more, ms: {process}": value for process, value in more.items()}


@dataclass(frozen=True, slots=True)
class _Step:
    """Means over the steps of a run. ``cpu_s``: by process."""

    time_s: float
    cpu_s: dict[str, float]


def _of_step(runs: Path, name: str, kept: int, steps: int) -> _Step:
    words = (
        f"training.steps={steps}",
        "agent_defaults.sft.batches=20",
        f"samples.steps={kept}",
        "evaluation.every=0",
        "data.eval_problems=8",
    )
    assert flexmarl(["train", "sort-digits", "--runs", str(runs), "--name", name, "-q", *words]) == 0
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines[_WARM_UP:]]
    first, last = found[0], found[-1]
    cpu = {
        key.removeprefix(_CPU): (last[key] - first[key]) / (len(found) - 1)
        for key in last
        if key.startswith(_CPU) and key in first
    }
    return _Step(statistics.fmean(line["step_s"] for line in found[1:]), cpu)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("list", "step"))
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    found = listing(given.samples) if given.what == "list" else paired_steps(given.pairs, given.steps)
    for name, value in found.items():
        print(f"{name:<36} {value if isinstance(value, list) else round(value, 4)}")


if __name__ == "__main__":
    main()
