"""Errors of the command line, run directories and benchmarks."""

from pathlib import Path

from ..core.base.texts import listing
from ..core.errors import FlexmarlError


class RunDirectoryError(FlexmarlError):
    """The run directory is missing, in use, or not a run's."""


class RunUnreachable(FlexmarlError):
    """A run can't be asked: it has not begun or has ended, is another user's, or does not admit these keys."""


class RunFailed(FlexmarlError):
    """A run that this program follows has failed; the text is the error of the run."""


class SharingRefused(FlexmarlError):
    """A run does not share its groups with another one. ``problem``: the reason, and a remedy."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class Interrupted(FlexmarlError):
    """A run was stopped at once: by a signal, ``flexmarl stop --now`` or the program."""


class LostActor(FlexmarlError):
    """A run has ended because one of its actors was lost; it may continue from its newest checkpoint. ``with_samples``:
    the actors run, but samples of groups that are trained in part were lost with a host."""

    def __init__(self, text: str, *, with_samples: bool) -> None:
        super().__init__(text)
        self.with_samples = with_samples


class LeftBehind(FlexmarlError):
    """A simulated run has ended, and parts of it are still there."""

    def __init__(self, tasks: list[str], systems: list[str], blocks: list[str]) -> None:
        super().__init__(f"an attempt has left tasks {tasks}, systems {systems} and memory {blocks}")
        self.tasks = tasks
        self.systems = systems
        self.blocks = blocks


class TooFewNodes(FlexmarlError):
    """Fewer hosts than the run wants have joined in time."""

    def __init__(self, count: int, joined: list[str], wait_s: float) -> None:
        present = f"there are {', '.join(joined)}" if joined else "there is none"
        super().__init__(
            f"{count} nodes had to join within {wait_s:g} s (--wait-s): {present}; continue with --nodes {count} "
            "again, or with as many as there are"
        )
        self.count = count
        self.joined = joined
        self.wait_s = wait_s


class NodesNotStarted(FlexmarlError):
    """Nodes could not be started by ssh; each problem names the host and its line in the hosts file."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(f"nodes could not be started:{listing(problems)}")
        self.problems = problems


class JobRefused(FlexmarlError):
    """Slurm has not taken the job."""


class NoRunToJoin(FlexmarlError):
    """A node has found no run, or one of a single host."""


class ResumeRefused(FlexmarlError):
    """A run can't be resumed as it is: settings or files are no longer those that its checkpoint was made with."""

    def __init__(self, run: Path, problems: list[str]) -> None:
        super().__init__(f"{run} can't be resumed as it is:{listing(problems)}")
        self.run = run
        self.problems = problems


class InvalidCondition(FlexmarlError):
    """A condition on a number can't be read. ``forms``: examples of those that can."""

    def __init__(self, text: str, forms: str = "12, '<0.2', '>=0.5' or 10-20") -> None:
        super().__init__(f"{text!r} is not a condition: write {forms}")
        self.text = text


class SamplesUnreadable(FlexmarlError):
    """The recorded trajectories of a run can't be read: their file is missing or damaged."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class NoDemonstration(FlexmarlError):
    """No recorded trajectory of a run can be a demonstration."""


class NoSpans(FlexmarlError):
    """A run has recorded no spans, or none of the steps that are asked for."""


class BenchmarkFailed(FlexmarlError):
    """A measurement failed: it has no result."""
