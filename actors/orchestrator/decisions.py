"""The decisions of ``pipeline.py``: plain data, carried out by ``orchestrator.py``."""

from dataclasses import dataclass, field
from typing import Final

from ..names import PolicyName, Step, Version

_NAMED: Final = "recipe"
"""The waits of the recipe's data and of the rollout workers name more."""


@dataclass(frozen=True, slots=True)
class StartStep:
    """``versions``: generate the step's turns; under ``async`` these or later ones. ``queries``: the step begins so
    many."""

    step: Step
    versions: dict[PolicyName, Version]
    queries: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Draw one more query for the step, in place of a dropped group."""

    step: Step


@dataclass(frozen=True, slots=True)
class CarryOn:
    """The groups of ``step`` that are still open, ``count`` of them, belong to the step after it."""

    step: Step
    count: int


@dataclass(frozen=True, slots=True)
class Train:
    """Train one micro-batch of ``count`` samples with the policy at ``version``."""

    policy: PolicyName
    step: Step
    version: Version
    count: int


@dataclass(frozen=True, slots=True)
class StepOptimizer:
    policy: PolicyName
    step: Step


@dataclass(frozen=True, slots=True)
class Publish:
    """Every instance of the policy applies ``version``."""

    policy: PolicyName
    step: Step
    version: Version


@dataclass(frozen=True, slots=True)
class Save:
    policy: PolicyName
    step: Step


@dataclass(frozen=True, slots=True)
class StepComplete:
    """Every policy has applied the version that follows the step, one of ``versions``. ``evaluated``: an evaluation
    comes next. ``carried``: rows that the step leaves to the next, by policy."""

    step: Step
    evaluated: bool
    versions: dict[PolicyName, Version] = field(default_factory=dict, compare=False)
    carried: dict[PolicyName, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Every policy has saved its state after ``step``, at ``versions``, and the step is complete and evaluated."""

    step: Step
    versions: dict[PolicyName, Version]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the joint version after ``step``."""

    step: Step
    versions: dict[PolicyName, Version]


@dataclass(frozen=True, slots=True)
class Finish:
    last_step: Step


Work = (
    StartStep
    | Replacement
    | Train
    | StepOptimizer
    | Publish
    | Save
    | StepComplete
    | CommitCheckpoint
    | Evaluate
    | Finish
)
"""Decisions that take time."""

Decision = Work | CarryOn


def wait_of(decision: Work) -> tuple[str, str, str]:
    """The wait of carrying out a decision, as the arguments of ``OpenWaits.open``."""
    match decision:
        case StartStep(step) | Replacement(step):
            return f"the queries of step {step}", "", _NAMED
        case Train(policy, step):
            return f"a micro-batch of {policy}, step {step}", "", "trainer"
        case StepOptimizer(policy, step):
            return f"the optimizer step of {policy}, step {step}", "", "trainer"
        case Publish(policy, step):
            return f"new weights of {policy} at its instances, step {step}", "", "router"
        case Save(policy, step):
            return f"the saving of {policy} after step {step}", "", "trainer"
        case CommitCheckpoint(step):
            return f"the checkpoint of step {step}, which is committed", "", ""
        case Evaluate(step):
            return f"the evaluation after step {step}", "", _NAMED
        case StepComplete(step) | Finish(step):
            return f"the end of step {step}", "", "console"
