"""The interface of a sink."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Kind = Literal["step", "evaluation"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one step, or of an evaluation after it (0: before training), by their keys in ``metrics.jsonl``; all
    are finite. ``time_s``: Unix seconds."""

    kind: Kind
    step: int
    time_s: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run whose figures a sink gets. ``folder``: the run's. ``recipe``: the recipe's folder. ``step``: the last one
    that a resumed run keeps, 0 in a new run. ``config``: its values by dotted key. ``spans``: those that the lives of
    the run before this one have recorded."""

    folder: Path
    recipe: Path
    step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    spans: int = 0

    @property
    def name(self) -> str:
        """The run's name, which is that of its folder."""
        return self.folder.name


class Sink(Protocol):
    """One output. All calls come from one thread, one after the other. Each may block, and may raise any error: the
    figures are lost then, and counted."""

    @property
    def appends_only(self) -> bool:
        """True if figures can't be replaced: the steps that a resumed run repeats are not written again."""
        ...

    def open(self, run: SinkRun, series: str) -> tuple[str, str]:
        """Called before the first ``write``, and again before the next one if it has raised. ``series``: as returned
        when the run was begun, empty before.

        Returns the name of the series, by which a resumed run continues it (empty if it needs none), and the place of
        the figures, for the person who started the run.
        """
        ...

    def write(self, figures: Figures) -> None:
        """Called for each step and evaluation, after ``open``, in their order."""

    def close(self, failed: bool) -> None:
        """Called once after ``open``, when the run has ended. ``failed``: by an error."""
        ...
