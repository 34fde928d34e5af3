"""The step that can train a loose group, whose rewards have come from outside. Pure.

It is the oldest step under way in which no policy has stepped, or else the next one, and its policies are not too far
ahead of the samples then. A step with a free place is preferred, so that steps are even.
"""

from collections.abc import Callable, Mapping

from ..names import PolicyName, Step, Version
from .plan import Plan
from .steps import StepState


def step_for(
    plan: Plan,
    steps: dict[Step, StepState],
    next_step: Step | None,
    versions: Mapping[PolicyName, Version],
    oldest: Mapping[PolicyName, Version],
    has_place: Callable[[Step], bool],
) -> Step | None:
    """None if the samples are too old for each step, or no step is left. ``steps``: those under way, in order.
    ``next_step``: None if no further one begins. ``versions``: those that are served. ``oldest``: the oldest version of
    the group's samples, by policy. ``has_place``: true of a step with a free place."""
    candidates = [number for number, step in steps.items() if _is_untrained(plan, step)]
    if next_step is not None:
        candidates.append(next_step)
    takes = [
        number
        for number in candidates
        if all(
            _version_at(steps, versions, number, policy) - version <= _most_staleness(plan, policy)
            for policy, version in oldest.items()
        )
    ]
    return next(filter(has_place, takes), next(iter(takes), None))


def _is_untrained(plan: Plan, step: StepState) -> bool:
    """True if no policy has begun its optimizer step. Also of policies without samples in a group that is ready: if
    its worker is lost before it closes, it runs again, and may have samples of any."""
    return not any(
        state.optimizing or state.stepped or state.done or (state.sent and policy in plan.whole_step)
        for policy, state in step.policies.items()
        if state.current
    )


def _most_staleness(plan: Plan, policy: PolicyName) -> int:
    # Rows beyond a batch of a fixed size are carried to the next step.
    return plan.max_staleness - (policy in plan.global_batch)


def _version_at(
    steps: dict[Step, StepState], versions: Mapping[PolicyName, Version], step: Step, policy: PolicyName
) -> Version:
    """The version that trains the step, or a later one: each step before it adds one at most."""
    for number, whole in reversed(steps.items()):
        state = whole.policies[policy]
        if state.current and number <= step:
            if state.stepped and number < step:
                return Version(state.version + state.optimizing + step - number - 1)
            return Version(state.version + step - number)
    return versions[policy]
