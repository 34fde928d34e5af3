"""The examination of a seed: its case is played and checked; one that fails is played again with fewer faults."""

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....core.base.collector import collecting_afterwards
from ...hosts import env
from .chaos_case import ChaosCase, draw_case
from .checks import Problem, problems_of
from .outcome import outcome_of, play_without_faults
from .saved_policies import SavedPolicy
from .shrinking import shrink


@dataclass(frozen=True, slots=True)
class Failure:
    """``faults``: the numbers of those with which the case fails by the check of its first problem."""

    case: ChaosCase
    faults: tuple[int, ...]
    problems: Sequence[Problem]

    @property
    def command(self) -> str:
        """The command that plays the failure again."""
        return f"flexmarl simulate --chaos-seed {self.case.seed} --faults {','.join(map(str, self.faults)) or 'none'}"

    def text(self) -> str:
        """Its problems, its faults and its command, a line each."""
        faults = [self.case.faults[number] for number in self.faults]
        lines = [f"seed {self.case.seed} of {self.case.hosts} hosts fails"]
        lines += [f"  {problem.check}: {problem.text}" for problem in self.problems]
        lines += [
            f"  fault {number}: {fault.kind} at {fault.at_s:.3f} s for {fault.lasts_s:.3f} s"
            for number, fault in zip(self.faults, faults, strict=True)
        ]
        return "\n".join([*lines, f"  again: {self.command}"])


def examine(case: ChaosCase) -> Failure | None:
    """None for a case without problems."""
    try:
        expected = _play_expected(case)
    except Exception as error:  # noqa: BLE001  # every end of a run is a finding
        return Failure(case, (), [Problem("ends", f"without faults {type(error).__name__}: {error}")])
    numbers = range(len(case.faults))
    if not (problems := _problems(case, numbers, expected)):
        return None
    check = problems[0].check

    def fails(kept: Sequence[int]) -> bool:
        return any(problem.check == check for problem in _problems(case, kept, expected))

    kept = shrink(numbers, fails)
    return Failure(case, tuple(kept), _problems(case, kept, expected))


def examine_seed(seed: int) -> Failure | None:
    """The same for the case of a seed."""
    return examine(draw_case(seed))


def _problems(
    case: ChaosCase, numbers: Collection[int], expected: Mapping[str, SavedPolicy]
) -> list[Problem]:
    with _folder() as folder:
        return problems_of(outcome_of(case.with_faults(numbers), folder / "run", expected))


def _play_expected(case: ChaosCase) -> Mapping[str, SavedPolicy]:
    """See ``play_without_faults``. That of the newest run is kept, as the next seeds have the same."""
    run = json.dumps(case.settings, sort_keys=True)
    if run not in _played:
        with _folder() as folder:
            expected = play_without_faults(case, folder / "without")
        _played.clear()
        _played[run] = expected
    return _played[run]


_played: Final[dict[str, Mapping[str, SavedPolicy]]] = {}


@contextmanager
def _folder() -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory(prefix="flexmarl-chaos-", dir=env.runtime_base()) as folder,
        collecting_afterwards(),  # a run makes few cycles, and the search for them takes a tenth of its time
    ):
        yield Path(folder)
