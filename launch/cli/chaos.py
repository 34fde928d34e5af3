"""The options ``--chaos`` and ``--chaos-seed`` of ``flexmarl simulate``."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ...actors.errors import ConfigError
from ...core.base.collector import spare_collector
from ..config.config_reading import to_yaml
from ..monitoring.console.echo import echo, echo_json
from ..simulate.chaos.chaos_case import ChaosCase, draw_case
from ..simulate.chaos.checks import problems_of
from ..simulate.chaos.examination import Failure, examine_seed
from ..simulate.chaos.outcome import outcome_of, play_without_faults

_FAILED = 1
_STOPPED = 130
_LINE_S = 60.0


def search(count: int, first: int, *, as_json: bool) -> int:
    """Examines ``count`` seeds from ``first`` on, and returns the exit status. Ctrl-C ends it with the seeds so far."""
    spare_collector()
    progress = _Progress(first, count, time.monotonic)
    failures, stopped = list[Failure](), False
    seeds = range(first, first + count)
    with _quiet(), click.progressbar(seeds, label="chaos", file=sys.stderr, show_pos=True) as bar:
        try:
            for seed in bar:
                if (failure := examine_seed(seed)) is not None:
                    failures.append(failure)
                    if not as_json:
                        echo(failure.text())
                # A terminal has the bar.
                if (line := progress.examined(len(failures))) is not None and not sys.stderr.isatty():
                    echo(line, err=True)
        except KeyboardInterrupt:
            stopped = True
    if as_json:
        records = [_record(failure) for failure in failures]
        clean = progress.done - len(failures)
        echo_json({"clean": clean, "failures": records, "stopped": stopped, "seed_s": progress.seed_s})
    else:
        echo(progress.text(len(failures)))
        if stopped and progress.rest:
            echo(
                f"stopped; the others: flexmarl simulate --chaos {progress.rest} --seed {progress.next_seed}"
            )
    return _STOPPED if stopped else _FAILED if failures else 0


class _Progress:
    """``done``: examined seeds."""

    def __init__(self, first: int, count: int, clock: Callable[[], float]) -> None:
        self.done = 0
        self._first, self._count = first, count
        self._clock = clock
        self._began_s = self._line_s = clock()

    @property
    def rest(self) -> int:
        """Seeds that are not examined yet."""
        return self._count - self.done

    @property
    def next_seed(self) -> int:
        """The first of them."""
        return self._first + self.done

    @property
    def seed_s(self) -> float:
        """The mean of seconds that a seed takes; 0 before the first."""
        return (self._clock() - self._began_s) / self.done if self.done else 0.0

    def examined(self, failures: int) -> str | None:
        """One more seed is examined; returns a line for people if the last one is older than a minute."""
        self.done += 1
        if self._clock() - self._line_s < _LINE_S:
            return None
        self._line_s = self._clock()
        return f"{self.text(failures)}; {self.rest} more take about {self.rest * self.seed_s / 60.0:.0f} min"

    def text(self, failures: int) -> str:
        """The seeds so far, in words."""
        clean = self.done - failures
        return f"{clean} seeds from {self._first} on are clean, {failures} fail; {self.seed_s:.2f} s a seed"


def replay(seed: int, faults: str | None, folder: Path, *, as_json: bool) -> int:
    """Plays the case of a seed, with some of its faults, keeps its files in ``folder``, and returns the exit status.
    Raises ConfigError for numbers of faults that it does not have."""
    case = draw_case(seed)
    case = case if faults is None else case.with_faults(_numbers(faults, case))
    with _quiet():
        expected = play_without_faults(case, folder / "without")
        outcome = outcome_of(case, folder / "run", expected)
    problems = problems_of(outcome)
    if as_json:
        echo_json({"seed": seed, "problems": {problem.check: problem.text for problem in problems}})
        return _FAILED if problems else 0
    echo(to_yaml(case.config()))
    for fault in outcome.injected or case.faults:
        echo(f"{fault}")
    for problem in problems:
        echo(f"{problem.check}: {problem.text}")
    echo(f"{'fails' if problems else 'clean'}; its files: {folder}")
    return _FAILED if problems else 0


def _numbers(faults: str, case: ChaosCase) -> set[int]:
    texts = [] if faults == "none" else faults.split(",")
    if not all(text.isdecimal() and int(text) < len(case.faults) for text in texts):
        numbers = f", or numbers from 0 to {len(case.faults) - 1} with commas" if case.faults else ""
        raise ConfigError(
            f"--faults {faults}: seed {case.seed} has {len(case.faults)} faults: write none{numbers}"
        )
    return {int(text) for text in texts}


def _record(failure: Failure) -> dict[str, object]:
    return {
        "seed": failure.case.seed,
        "faults": failure.faults,
        "problems": {problem.check: problem.text for problem in failure.problems},
        "command": failure.command,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Lines about losses are not logged: each of these runs has some."""
    log = logging.getLogger("flexmarl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
