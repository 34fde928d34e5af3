"""The plan of a run: its mode, its steps, and how large they are."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..names import PolicyName, Step

Mode = Literal["strict", "sync", "async"]
Barrier = Literal["policy", "step"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps ``first_step ... last_step`` of ``queries`` groups each.

    ``micro_batch``: samples of one forward and backward; ``largest_micro_batch``: those of several that wait together,
    at most, 0 for no more than ``micro_batch``. ``most_under_way``: computations of a policy, if those are joined.
    ``save_every`` and ``evaluate_every`` are in steps, 0 for never; the last step is always saved and evaluated.
    ``evaluate_first``: evaluate before the first step.
    ``max_staleness``: versions, at least 1 under ``async`` and 0 otherwise. ``global_batch``: samples of an optimizer
    step, by policy, under ``async``; a policy that is not in it takes all samples of a step. ``whole_step``: policies
    that train a step only once it is rolled out. ``replacement_queries``: the most further queries of a step.
    ``extra_queries``: those beyond ``queries`` that are begun under ``async``, and passed on into the next step.
    ``barrier``: of ``strict``; see ``TrainingConfig``.
    """

    mode: Mode
    policies: tuple[PolicyName, ...]
    first_step: Step
    last_step: Step
    queries: int
    micro_batch: int
    save_every: int = 0
    evaluate_every: int = 0
    evaluate_first: bool = False
    max_staleness: int = 0
    global_batch: Mapping[PolicyName, int] = field(default_factory=dict)
    whole_step: tuple[PolicyName, ...] = ()
    replacement_queries: int = 0
    extra_queries: int = 0
    barrier: Barrier = "policy"
    largest_micro_batch: int = 0
    most_under_way: int = 3

    def is_evaluation_due(self, step: Step, evaluated: Collection[int]) -> bool:
        """True if a run that begins after ``step`` begins with an evaluation: an earlier one may have been stopped
        before it. ``evaluated``: the steps with one."""
        every = self.evaluate_every
        return step not in evaluated and (step == 0 or bool(every and step % every == 0))

    def saves(self, step: Step) -> bool:
        """True if a step that is not the last is saved."""
        return step > 0 and self.save_every > 0 and step % self.save_every == 0

    @property
    def steps_ahead(self) -> int:
        """Number of the steps before one that may be incomplete when it begins, under ``async``."""
        return self.max_staleness - bool(self.global_batch) - bool(self.extra_queries)
