"""Policies that learn nothing are named, and no others."""

from collections.abc import Iterable

from flexmarl.actors.figures import Numbers
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.monitoring.console.learning_watch import LearningWatch

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
LEARNS: Numbers = {"samples": 8, "nonzero_advantage_share": 0.5, "skipped_updates": 0}


def metrics(step: int, dropped: int = 0, **policies: Numbers) -> StepMetrics:
    return StepMetrics(
        Step(step),
        1.0,
        1.0,
        0.5,
        9,
        9.0,
        versions={SOLVER: Version(step), JUDGE: Version(step)},
        figures={"dropped_groups": dropped},
        filters={"equal_rewards": 8.0, "overlong": 1.0} if dropped else {},
        by_policy={PolicyName(policy): figures for policy, figures in policies.items()},
    )


def warnings(steps: Iterable[StepMetrics]) -> list[tuple[int, str]]:
    watch = LearningWatch()
    return [(step.step, text) for step in steps for text in watch.warnings(step)]


def test_equal_rewards_are_named_after_five_steps_and_more_and_more_rarely() -> None:
    equal = LEARNS | {"nonzero_advantage_share": 0.0, "skipped_updates": 1}
    named = warnings(metrics(step, solver=equal, judge=LEARNS) for step in range(1, 30))
    assert [step for step, _ in named] == [5, 10, 20]
    assert all(text.startswith("policy solver has learned nothing in the last ") for _, text in named)
    assert "every advantage was 0" in named[0][1] and "last 5 steps" in named[0][1]


def test_a_policy_without_samples_is_named_with_the_groups_that_were_left_out() -> None:
    [(step, text)] = warnings(metrics(step, dropped=3, judge=LEARNS) for step in range(1, 7))
    assert step == 5 and "policy solver" in text and "no sample of it was trained" in text
    assert text.endswith("3 groups were dropped, and filters left samples out: equal_rewards 8, overlong 1")


def test_a_gradient_of_zero_is_a_reason_too() -> None:
    still = LEARNS | {"skipped_updates": 1}
    [(_, text)] = warnings(metrics(step, solver=LEARNS, judge=still) for step in range(1, 6))
    assert text.startswith("policy judge") and "its gradient was zero" in text


def test_one_step_that_teaches_ends_the_count() -> None:
    equal = LEARNS | {"nonzero_advantage_share": 0.0}
    steps = [metrics(step, solver=LEARNS if step % 5 == 0 else equal, judge=LEARNS) for step in range(1, 40)]
    assert warnings(steps) == []


def test_a_policy_that_collects_its_batch_is_not_idle() -> None:
    assert warnings(metrics(s, solver={"carried_samples": 4}, judge=LEARNS) for s in range(1, 20)) == []
