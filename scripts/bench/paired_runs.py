"""Pairs of runs that share the machine at the same time, so that what else it does disturbs both: the costs of a
step."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

_WARM_UP: Final = 10
_CPU: Final = "cpu_s/"
_LOOK_S: Final = 0.01
_LONGEST_S: Final = 600.0
_WORDS: Final = ("agent_defaults.sft.batches=20", "evaluation.every=0", "data.eval_problems=8")


PROGRAM: Final = str(Path(sys.executable).with_name("flexmarl"))


@dataclass(frozen=True, slots=True)
class Side:
    """One run of each pair. ``settings``: its own, beside the recipe's. ``program``: ``flexmarl`` of this version or of
    another one. ``client``: entered with the run's folder while the run lasts, in a process that is not counted."""

    settings: tuple[str, ...] = ()
    program: str = PROGRAM
    client: Callable[[Path], AbstractContextManager[object]] = nullcontext


def paired_steps(
    pairs: int,
    steps: int,
    side: Side,
    other: Side,
    recipe: Sequence[str] = ("sort-digits", *_WORDS),
) -> dict[str, Any]:
    """Ratios of the time and the CPU time of a step: of ``side`` to ``other``. ``recipe``: its name or path, and
    settings of both."""
    figures: dict[str, Any] = {}
    means = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            words = (*recipe, f"training.steps={steps}")
            runs = [
                _RunBeside(Path(folder), f"{pair}-{number}", words, of)
                for number, of in enumerate((side, other))
            ]
            for run in runs if pair % 2 else reversed(runs):
                run.start()
            with ExitStack() as clients:
                for run in runs:
                    clients.enter_context(run.side.client(run.folder))
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
    """A run in processes of its own. ``words``: its recipe and the settings of both runs."""

    def __init__(self, runs: Path, name: str, words: Sequence[str], side: Side) -> None:
        self.side = side
        self.folder = runs / name
        self._command = (
            side.program,
            "train",
            "--runs",
            str(runs),
            "--name",
            name,
            "-q",
            *words,
            *side.settings,
        )
        self._metrics = self.folder / "metrics.jsonl"
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
