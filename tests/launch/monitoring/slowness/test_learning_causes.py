"""Causes of learning little: of small real runs, whose learning rate or whose age of the samples is the cause."""

import re
from dataclasses import replace

import pytest

from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.monitoring.slowness.finding import Finding
from flexmarl.launch.monitoring.slowness.findings import findings
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.run_findings import run_findings
from flexmarl.launch.run_folder.stored_run import read_run

from ...in_process import RunsHere
from .test_findings import plain_steps

ALONE = (
    "agents={solver: {}}", "data.shape=alone", "checkpoint.every=0", "agent_defaults.sampling.max_new_tokens=8",
)  # fmt: skip


def learning_findings(runs_here: RunsHere, name: str, *settings: str) -> dict[str, Finding]:
    """By cause: those that cost no time."""
    run = runs_here.train(name, *ALONE, *settings)
    assert run.status == 0, run.text
    config = read_run(run.directory).config
    return {
        finding.cause: finding
        for finding in run_findings(RunDirectory(run.directory), config)
        if finding.seconds_per_step is None
    }


def test_old_samples_and_large_steps_have_engine_and_trainer_drift_apart(runs_here: RunsHere) -> None:
    settings = ("mode=async", "max_staleness=4", "agent_defaults.engine.max_batch=2", "training.steps=12")
    causes = learning_findings(runs_here, "drifting", *settings, "agent_defaults.optimizer.lr=0.03")
    drift = causes["drifting probabilities"]
    assert drift.key == "max_staleness"
    assert drift.sentence.startswith(
        "trainer and engine differ on the probabilities of the tokens of solver by "
    )
    assert drift.sentence.endswith(" of its samples are of an older version")


def test_a_policy_that_learns_fast_loses_its_entropy_and_agrees_with_its_engine(runs_here: RunsHere) -> None:
    causes = learning_findings(runs_here, "sure", "training.steps=30", "agent_defaults.optimizer.lr=0.01")
    assert "drifting probabilities" not in causes
    falling = causes["falling entropy"]
    assert falling.key == "policies.solver.algorithm.entropy_coefficient"
    assert re.match(r"the entropy of solver fell from [12]\.", falling.sentence)
    assert ", while the reward of solver rose from 0." in falling.sentence


def test_a_policy_that_hardly_moves_has_neither(runs_here: RunsHere) -> None:
    causes = learning_findings(runs_here, "still", "training.steps=20", "agent_defaults.optimizer.lr=1e-6")
    assert not causes.keys() & {"drifting probabilities", "falling entropy"}


def drifting_steps(growth: float) -> list[StepMetrics]:
    """Steps whose deviation grows by ``growth`` from one to the next."""
    shared, solver = PolicyName("shared"), AgentName("solver")
    return [
        replace(
            step,
            by_policy={shared: {"ratio_deviation": growth * step.step, "samples": 8, "stale_samples": 0}},
            by_agent={solver: {"reward": 0.5}},
        )
        for step in plain_steps(28)
    ]


@pytest.mark.parametrize(
    ("dtype", "correction", "key"),
    [
        ("bfloat16", "none", "policies.shared.algorithm.correction"),
        ("bfloat16", "tis", "policies.shared.model.dtype"),
        ("float32", "tis", "weights.probe_every"),
    ],
)
def test_a_drift_without_old_samples_names_the_setting_that_would_change_it(
    dtype: str, correction: str, key: str
) -> None:
    config = {"policies.shared.model.dtype": dtype, "policies.shared.algorithm.correction": correction}
    _, drift = findings(drifting_steps(growth=0.02), config)
    assert drift.key == key
    bound = 0.1 if dtype == "bfloat16" else 0.01
    assert f"by 0.47 of their value in the mean, after 0.13; rounding is below {bound}, " in drift.sentence


def test_a_difference_within_the_bound_of_the_run_is_rounding() -> None:
    config = {"policies.shared.model.dtype": "bfloat16"}
    (longest,) = findings(drifting_steps(growth=0.001), config)
    assert longest.cause == "longest part"
    bound = {"policies.shared.algorithm.ratio_deviation_warning": 0.005}
    _, drift = findings(drifting_steps(growth=0.001), config | bound)
    assert drift.cause == "drifting probabilities"
