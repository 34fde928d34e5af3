"""The figures of a run's newest steps, as the causes read them. Pure."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from ....actors.figures import Subject
from ....actors.names import AgentName, PolicyName
from ....actors.step_metrics import SUBJECT_OF, StepMetrics
from ..formatting import duration
from .step_parts import PARTS, Part, split_step

WINDOW: Final = 50
"""The steps that are looked at, the newest ones."""


class Evidence:
    """``steps``: ascending, the newest ``WINDOW`` of those that are given. The first step of a run is left out: it has
    the start of engines in it. ``config``: by dotted key."""

    def __init__(self, steps: Sequence[StepMetrics], config: Mapping[str, Any]) -> None:
        self.steps = [step for step in steps[-WINDOW:] if step.step > 1]
        self.config = config

    def per_step(self, subject: Subject, name: str, figure: str) -> float:
        """The sum over the steps, divided by their number. ``subject``: ``agent``, ``policy`` and so on."""
        return math.fsum(self.values(subject, name, figure)) / len(self.steps)

    def values(self, subject: Subject, name: str, figure: str) -> list[float]:
        """Values of the steps that have the figure."""
        part = _PART_OF[subject]
        figures = (getattr(step, part).get(name, {}).get(figure) for step in self.steps)
        return [value for value in figures if value is not None]

    def of_steps(self, figure: str) -> list[float]:
        """Values of a figure of the step, of the steps that have it."""
        return [step.figures[figure] for step in self.steps if figure in step.figures]

    def names(self, subject: Subject) -> list[str]:
        """Names of the agents, policies and so on with figures, in the order of their first step."""
        part = _PART_OF[subject]
        return list(dict.fromkeys(name for step in self.steps for name in getattr(step, part)))

    @cached_property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return math.fsum(step.step_s for step in self.steps) / len(self.steps)

    @cached_property
    def parts(self) -> Mapping[Part, float]:
        """Mean seconds of each part of a step."""
        splits = [split_step(step) for step in self.steps]
        return {part: math.fsum(split[at] for split in splits) / len(splits) for at, part in enumerate(PARTS)}

    @property
    def mode(self) -> str:
        """The run's mode; ``strict`` if the config lacks it."""
        return str(self.config.get("mode", "strict"))

    @cached_property
    def policies(self) -> dict[PolicyName, list[AgentName]]:
        """The agents of each policy that generates, as far as the config says."""
        policies: dict[PolicyName, list[AgentName]] = {}
        for agent in self.names("agent"):
            policy = self.config.get(f"agents.{agent}.policy")
            if isinstance(policy, str):
                policies.setdefault(PolicyName(policy), []).append(AgentName(agent))
        return policies

    def of_step(self, seconds: float) -> str:
        """Seconds in words, in relation to a step: ``1.2 s of a step of 4 s``."""
        return f"{duration(seconds)} of a step of {duration(self.step_s)}"


_PART_OF: Final = {subject: part for part, subject in SUBJECT_OF.items()}
