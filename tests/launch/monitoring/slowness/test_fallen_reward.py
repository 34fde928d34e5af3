"""The alarm of a reward that falls off its best, and the checkpoint that it names."""

from collections.abc import Sequence

import pytest

from flexmarl.actors.names import AgentName, Step
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.monitoring.slowness.evidence import Evidence
from flexmarl.launch.monitoring.slowness.fallen_reward import fallen_reward
from flexmarl.launch.monitoring.slowness.finding import Finding
from flexmarl.launch.monitoring.slowness.findings import findings

SOLVER = AgentName("solver")
RISE = [0.08 * step for step in range(9)]
BEST = [0.8, 0.82, 0.8, 0.78, 0.8]
FALL = [0.5, 0.52, 0.5, 0.48, 0.5]


def steps_of(rewards: Sequence[float]) -> list[StepMetrics]:
    """Steps from 2 on: the first of a run is left out."""
    return [
        StepMetrics(Step(step), 4.0 * step, 4.0, 3.0, 100, 25.0, by_agent={SOLVER: {"reward": reward}})
        for step, reward in enumerate(rewards, 2)
    ]


def found(rewards: Sequence[float], **checkpoint: int) -> list[Finding]:
    config = {f"checkpoint.{key}": value for key, value in checkpoint.items()}
    return list(fallen_reward(Evidence(steps_of(rewards), config)))


@pytest.mark.parametrize(
    ("checkpoint", "remedy", "key"),
    [
        ({"every": 5, "keep": 9}, "return to the checkpoint step_000015, by init_from", ""),
        ({"every": 5, "keep": 2}, "return to the checkpoint step_000015, by init_from", ""),
        (
            {"every": 5, "keep": 1},
            "the checkpoint step_000015 was the one to return to, and is not kept",
            "checkpoint.keep",
        ),
        ({"every": 50, "keep": 2}, "no checkpoint is of a step up to these", "checkpoint.every"),
        ({"every": 0, "keep": 2}, "no checkpoint is of a step up to these", "checkpoint.every"),
    ],
)
def test_a_fall_is_named_with_the_best_steps_and_their_checkpoint(
    checkpoint: dict[str, int], remedy: str, key: str
) -> None:
    (finding,) = found(RISE + BEST + FALL, **checkpoint)
    assert finding.sentence == (
        f"the reward of solver is 0.5 in the newest 5 steps, and was 0.8 in steps 11 to 15: {remedy}"
    )
    assert (finding.cause, finding.key, finding.seconds_per_step) == ("fallen reward", key, None)


@pytest.mark.parametrize(
    "rewards",
    [
        RISE + BEST,
        RISE + BEST + [0.65] * 5,  # within the margin
        [0.1, -0.1, 0.2, -0.2, 0.1, -0.1, 0.1, -0.2, 0.2, -0.2],  # noise around 0
        BEST + FALL[:4],  # too short to compare
    ],
    ids=["rises", "small", "noise", "short"],
)
def test_a_reward_that_has_not_fallen_is_not_named(rewards: list[float]) -> None:
    assert found(rewards, every=5, keep=2) == []


def test_it_is_among_the_findings_of_a_run() -> None:
    causes = [finding.cause for finding in findings(steps_of(RISE + BEST + FALL), {"checkpoint.every": 5})]
    assert "fallen reward" in causes
