"""Causes of slowness: of simulated runs whose cause is known, and of made-up figures."""

from dataclasses import replace

import pytest

from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.monitoring.slowness.finding import Finding
from flexmarl.launch.monitoring.slowness.findings import LEAST_STEPS, findings
from flexmarl.launch.monitoring.slowness.words import finding_lines

from .simulated import simulated_findings


def plain_steps(number: int) -> list[StepMetrics]:
    """Steps of 4 s, of which rollouts are 3 s; the first is a run's first."""
    return [
        StepMetrics(Step(step), 4.0 * step, 4.0, 3.0, 100, 25.0, overlap_s=0.0)
        for step in range(1, number + 1)
    ]


def test_instances_without_room_are_named_with_the_waits_of_their_turns() -> None:
    first, *_ = simulated_findings("agent_defaults.engine.max_batch=1", "training.queries_per_step=20")
    assert first.cause == "saturated instances" and first.key == "policies.solver.instances"
    assert first.sentence.startswith("the 2 instances of solver are full: a turn waits ")
    assert first.seconds_per_step is not None and first.seconds_per_step > 1.0


def test_training_after_the_rollouts_is_named_with_the_mode_that_hides_it() -> None:
    (strict,) = simulated_findings("trainer.optimizer_s=2")
    assert (strict.cause, strict.key) == ("late training", "mode")
    assert strict.seconds_per_step is not None and strict.seconds_per_step > 2.0
    assert strict.sentence.endswith("async trains during the rollouts of the next step")
    (sync,) = simulated_findings("mode=sync")
    assert (sync.cause, sync.key) == ("late training", "mode")
    assert sync.sentence.endswith("strict trains during the rollouts")


def test_a_healthy_run_has_its_longest_part_and_no_key() -> None:
    (finding,) = simulated_findings()
    assert (finding.cause, finding.key) == ("longest part", "")
    assert finding.sentence.startswith("rollouts are ")


def test_slow_installs_are_named_with_their_parts() -> None:
    (finding,) = simulated_findings("agent_defaults.engine.install_s=2")
    assert (finding.cause, finding.key) == ("slow installs", "")
    assert finding.sentence.endswith("takes 0 s to copy them and 2 s to load them")


LONG_TAILS = (
    "training.trajectories_per_query=4", "agent_defaults.engine.sigma=2", "agent_defaults.sampling.max_new_tokens=1000",
)  # fmt: skip


def test_groups_that_wait_for_one_long_turn_are_named_with_the_query_and_its_agent() -> None:
    (finding,) = simulated_findings(*LONG_TAILS)
    assert (finding.cause, finding.key) == ("late groups", "rollout.extra_trajectories")
    assert finding.seconds_per_step is not None and finding.seconds_per_step > 1.0
    assert (
        ", at last q" in finding.sentence and "half of the turns of solver have at most " in finding.sentence
    )


def test_groups_that_close_without_their_slowest_trajectory_are_not_late() -> None:
    (finding,) = simulated_findings(*LONG_TAILS, "rollout.extra_trajectories=1")
    assert finding.cause == "longest part"


@pytest.mark.parametrize(
    ("setting", "place"),
    [("environment_s", "before and between the turns"), ("reward_s", "after the last turn, for the reward")],
)
def test_code_of_the_recipe_that_waits_is_named_with_its_place(setting: str, place: str) -> None:
    first, *_ = simulated_findings(f"data.{setting}=1")
    assert (first.cause, first.key) == ("slow environment", "mode")
    assert first.seconds_per_step is not None and first.seconds_per_step > 1.0
    assert f" of their time in code of the recipe: 80% {place}; " in first.sentence


def test_a_worker_that_computes_all_the_time_is_named_with_the_number_of_workers() -> None:
    steps = [
        replace(
            step,
            figures={"environment_s": 10.0, "reward_s": 0.0},
            by_agent={AgentName("solver"): {"queue_s": 0.0, "service_s": 10.0}},
            by_process={"rollout-0": {"cpu_s": 3.8 * step.step}},
        )
        for step in plain_steps(9)
    ]
    first, *_ = findings(steps, {})
    assert (first.cause, first.key, first.seconds_per_step) == ("slow environment", "rollout.workers", 1.5)
    assert first.sentence.endswith("rollout-0 computes 95% of the time, and more workers share it")


@pytest.mark.parametrize(("services", "key"), [(0, "rollout.processes"), (2, "rewards.processes")])
def test_reward_functions_that_wait_for_a_process_are_named(services: int, key: str) -> None:
    steps = [
        replace(
            step,
            figures={"environment_s": 10.0, "reward_s": 0.0, "reward_queue_s": 6.0, "reward_compute_s": 2.0},
            by_agent={AgentName("solver"): {"queue_s": 0.0, "service_s": 10.0}},
        )
        for step in plain_steps(9)
    ]
    first, *_ = findings(steps, {"rewards.services": services})
    assert (first.cause, first.key) == ("slow environment", key)
    assert first.sentence.endswith("reward functions wait 75% of their time for a process")


SWAPS = (
    "agent_defaults.trainer.times=[{token_s: 1.0e-4, pair_s: 0, spare_tokens: 0, exchange_s: 0, tokens_per_forward: "
    "4096, optimizer_s: 0.1, save_s: 0}]",
    "pool.name=shared",
)  # fmt: skip


def test_states_that_move_after_the_rollouts_are_named_with_the_slots_that_would_save_it() -> None:
    (few,) = simulated_findings(*SWAPS, "pool.slots=1", state_s=0.5)
    assert (few.cause, few.key) == ("late swaps", "pool.slots")
    assert few.seconds_per_step is not None and 1.5 < few.seconds_per_step < 2.0
    assert "; solver is on its way for 2.19 s, suspended 1.1 times a step; " in few.sentence


@pytest.mark.parametrize(("slots", "state_s"), [(2, 0.5), (1, None)])
def test_states_that_stay_or_move_in_no_time_are_not_named(slots: int, state_s: float | None) -> None:
    made = simulated_findings(*SWAPS, f"pool.slots={slots}", state_s=state_s)
    causes = {finding.cause for finding in made}
    assert "late swaps" not in causes


def test_equal_rewards_a_captured_policy_and_a_blocked_loop_are_named() -> None:
    policy, solver, judge = PolicyName("shared"), AgentName("solver"), AgentName("judge")
    steps = [
        replace(
            step,
            by_policy={policy: {"nonzero_advantage_share": 0.125}},
            by_agent={
                solver: {"advantage_share": 0.95, "token_share": 0.6},
                judge: {"advantage_share": 0.05, "token_share": 0.4},
            },
            by_process={"rollout-0": {"loop_lag_ms": 1500.0}, "store": {"loop_lag_ms": 1500.0}},
        )
        for step in plain_steps(9)
    ]
    policies = {"agents.solver.policy": "shared", "agents.judge.policy": "shared"}
    blocked, equal, captured = findings(steps, policies)
    assert blocked.seconds_per_step == 1.5 and "rollout-0" in blocked.sentence
    assert equal.cause == "equal rewards" and equal.sentence.startswith("12% of the samples of shared ")
    assert captured.cause == "captured policy" and captured.sentence.startswith("solver has 95% ")


def test_a_step_counts_by_its_tokens_in_the_share_of_an_agent() -> None:
    """One large step of the judge outweighs many small ones of the solver."""
    policy, solver, judge = PolicyName("shared"), AgentName("solver"), AgentName("judge")

    def step_of(step: StepMetrics, share: float, tokens: float) -> StepMetrics:
        shares = {
            solver: {"advantage_share": share, "token_share": share},
            judge: {"advantage_share": 1.0 - share, "token_share": 1.0 - share},
        }
        return replace(step, by_policy={policy: {"samples": 1, "mean_tokens": tokens}}, by_agent=shares)

    policies = {"agents.solver.policy": "shared", "agents.judge.policy": "shared"}
    steps = plain_steps(21)
    small = [step_of(step, 0.99, 10.0) for step in steps[:-1]]
    causes = [finding.cause for finding in findings([*small, step_of(steps[-1], 0.0, 800.0)], policies)]
    assert "captured policy" not in causes
    captured = findings([*small, step_of(steps[-1], 0.5, 20.0)], policies)[-1]
    assert captured.sentence.startswith(
        "solver has 94% of the advantages that shared learns from, and 94% of its"
    )


def test_a_policy_is_captured_by_its_gradient_where_that_is_measured() -> None:
    solver, judge = AgentName("solver"), AgentName("judge")
    steps = [
        replace(
            step,
            by_agent={
                solver: {"advantage_share": 0.5, "token_share": 0.6, "gradient_share": 0.96},
                judge: {"advantage_share": 0.5, "token_share": 0.4, "gradient_share": 0.04},
            },
        )
        for step in plain_steps(9)
    ]
    policies = {"agents.solver.policy": "shared", "agents.judge.policy": "shared"}
    (captured, *_) = [finding for finding in findings(steps, policies) if finding.cause == "captured policy"]
    assert captured.sentence.startswith("solver has 96% of the gradient's norm that shared learns from")


def test_a_few_steps_prove_nothing() -> None:
    assert findings(plain_steps(LEAST_STEPS), {}) == []
    (finding,) = findings(plain_steps(LEAST_STEPS + 1), {})
    assert finding.seconds_per_step == 3.0
    assert finding.sentence == (
        "rollouts are 3 s of a step of 4 s; no figure shows a part that a setting would save"
    )


def test_three_findings_are_shown_with_their_seconds_and_keys() -> None:
    shown = [Finding("a", 1.5, "slow", "mode"), Finding("b", 1.0, "long"), Finding("c", None, "dull", "seed")]
    assert finding_lines([*shown, *shown])[1:] == [
        "  up to 1.5 s a step: slow [mode]",
        "  long",
        "  dull [seed]",
    ]
    assert finding_lines([]) == []
