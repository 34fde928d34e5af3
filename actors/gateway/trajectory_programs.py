"""The programs of one trajectory, as its worker sees them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from .program import ProgramEnd

current_programs: ContextVar["TrajectoryPrograms | None"] = ContextVar("current_programs", default=None)
"""Those of the trajectory whose workflow runs."""


@dataclass(frozen=True, slots=True)
class ProgramSampling:
    """An agent's limit of new tokens. ``is_training``: its turns are to be trained, so none may be greedy."""

    max_new_tokens: int
    is_training: bool


@dataclass(slots=True)
class TrajectoryPrograms:
    """``sampling``: by agent; those without one have no limits. ``counts``: turns by their place in the conversations
    of a program, see ``Session``. ``left_out``: the ids of samples that are not trained. ``running``: the commands,
    with the limit of each."""

    sampling: Mapping[str, ProgramSampling] = field(default_factory=dict)
    ended: list[ProgramEnd] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    left_out: set[str] = field(default_factory=set)
    running: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def run(self, command: str, limit: str) -> Iterator[None]:
        """A program runs. ``limit``: the setting that ends it; empty if only the trajectory's does."""
        self.running.append((command, limit))
        try:
            yield
        finally:
            self.running.remove((command, limit))
