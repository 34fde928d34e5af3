"""The options ``--chaos`` and ``--chaos-seed`` of ``flexmarl simulate``."""

import logging
import sys
from collections.abc import Iterator
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


def search(count: int, first: int, *, as_json: bool) -> int:
    """Examines ``count`` seeds from ``first`` on, and returns the exit status. Ctrl-C ends it with the seeds so far."""
    spare_collector()
    clean, failures, stopped = 0, list[Failure](), False
    seeds = range(first, first + count)
    with _quiet(), click.progressbar(seeds, label="chaos", file=sys.stderr, show_pos=True) as bar:
        try:
            for seed in bar:
                if (failure := examine_seed(seed)) is None:
                    clean += 1
                    continue
                failures.append(failure)
                if not as_json:
                    echo(failure.text())
        except KeyboardInterrupt:
            stopped = True
    if as_json:
        echo_json(
            {"clean": clean, "failures": [_record(failure) for failure in failures], "stopped": stopped}
        )
    else:
        echo(f"{clean} seeds from {first} on are clean, {len(failures)} fail{', stopped' * stopped}")
    return _STOPPED if stopped else _FAILED if failures else 0


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
