"""Measurements of one training step: what the orchestrator reports to the console after every step.

Rewards and turns are an agent's, everything about weights is a policy's: two agents on one policy have two rewards and
one loss. ``launch/run_folder/json_lines.py`` writes these objects to ``metrics.jsonl`` and reads them back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from .figures import Numbers, Subject, check_figures
from .names import AgentName, PolicyName, Step, Version

SUBJECT_OF: Final[Mapping[str, Subject]] = {
    "by_agent": "agent",
    "by_policy": "policy",
    "by_opponent": "opponent",
    "by_process": "process",
    "by_device": "device",
}
"""The fields of ``StepMetrics`` with figures by a name, and the subject that has it."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step of the run; times are seconds. The figures of each subject are by their names in ``figures.py``.

    The fields before ``figures`` are figures of the step too. They have types, because the console, the report and the
    readers of a run's steps compute with them, and a line of a file must have them. ``by_process``,
    ``by_actor`` and ``by_device`` are filled in by the console. Raises UnknownFigure.
    """

    step: Step
    time_s: float
    """From the start of the (resumed) run to the end of the step."""
    step_s: float
    """From the end of the step before."""
    rollout_s: float
    """From the first turn to the end of the last trajectory."""
    tokens: int
    """Generated tokens of all agents."""
    tokens_per_s: float
    overlap_s: float | None = None
    """The part of ``rollout_s`` in which the step was trained too; None under ``async``."""
    eval_s: float | None = None
    """Seconds of the evaluation after the step, if there was one; not in ``step_s``."""
    versions: dict[PolicyName, Version] = field(default_factory=dict)
    """After the step, by policy; all policies that are trained are in it."""
    generated_by: dict[PolicyName, Version] = field(default_factory=dict)
    """The version that the step's turns were meant for (``async``: the oldest such version)."""
    last_query: str = ""
    """The id of the query whose group has ended the step's rollout."""
    figures: Numbers = field(default_factory=dict)
    """All other figures of the step."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation by name, such as ``accuracy`` and ``reward/<agent>``."""
    workflow: dict[str, float] = field(default_factory=dict)
    """Means of the workflow's own metrics over the step's trajectories, by name."""
    source: dict[str, float] = field(default_factory=dict)
    """Figures of the query source, by name."""
    filters: dict[str, float] = field(default_factory=dict)
    """By filter of ``rollout.filters``: the samples that it left out; filters that left out nothing are not in it."""
    by_agent: dict[AgentName, Numbers] = field(default_factory=dict)
    by_policy: dict[PolicyName, Numbers] = field(default_factory=dict)
    """Without an optimizer step, only the figures that need none."""
    by_opponent: dict[PolicyName, Numbers] = field(default_factory=dict)
    """The games of the step against the member of a pool of past versions that played it, by the pool's policy."""
    by_process: dict[str, Numbers] = field(default_factory=dict)
    """Each actor process at the end of the step."""
    by_device: dict[str, Numbers] = field(default_factory=dict)
    """By UUID: each GPU of the machine in the step, of readings a second apart."""
    by_actor: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures of the actors' own ``statistics()``, by actor and name: engine, transport, store."""

    def __post_init__(self) -> None:
        check_figures("step", self.figures)
        for part, subject in SUBJECT_OF.items():
            for numbers in getattr(self, part).values():
                check_figures(subject, numbers)
