"""Plans of a small scenario: what fits, the bounds, and the search with made-up figures in place of simulations."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from flexmarl.actors.names import PolicyName
from flexmarl.launch.hosts.placement.plan import DoesNotFit
from flexmarl.launch.simulate.planning.candidates import Candidate
from flexmarl.launch.simulate.planning.plan_result import limit_of, plan_json, plan_text
from flexmarl.launch.simulate.planning.planned_settings import settings_of
from flexmarl.launch.simulate.planning.planned_space import planned_space
from flexmarl.launch.simulate.planning.planner import PlanOutcome, ScenarioFile, search_plan
from flexmarl.launch.simulate.scenario import Scenario, simulated_config
from flexmarl.launch.simulate.summary import Summary

SCENARIO = Path(__file__).parents[1] / "scenario.yaml"
SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
LARGE_MODEL = (
    "agent_defaults.model.config={model_type: qwen2, hidden_size: 3584, intermediate_size: 18944, "
    "num_hidden_layers: 28, num_attention_heads: 28, num_key_value_heads: 4, vocab_size: 152064, "
    "max_position_embeddings: 4096, tie_word_embeddings: false}",
    "trainer.activation_checkpointing=true",
)

SMALL_DEVICE = "{tflops: 100, memory_gib: 6, memory_gb_s: 900, link_gb_s: 50, host_gb_s: 16}"


def scenario(*settings: str) -> ScenarioFile:
    return ScenarioFile(SCENARIO, settings)


def figures(step_s: float, **changes: float | str) -> Summary:
    zeros = {field.name: 0 for field in fields(Summary)}
    return Summary(**{**zeros, "steps": 1, "step_s": step_s, **changes})  # type: ignore[arg-type]


def search(play_seconds: list[float | BaseException], *settings: str, limit: int = 6) -> PlanOutcome:
    """``play_seconds``: of the scenario as it is, and of the candidates as they come."""
    left = iter(play_seconds)

    def play(_scenario: Scenario) -> Summary:
        result = next(left)
        if isinstance(result, BaseException):
            raise result
        return figures(result)

    described = scenario(*settings)
    return search_plan(described, planned_space(described.read()), limit, lambda line: None, play)


def test_each_candidate_is_a_scenario_that_fits() -> None:
    described = scenario("cluster.devices=8")
    space = planned_space(described.read())
    outcome = search([9.0, 8.0, 7.0, 6.0], "cluster.devices=8", limit=3)
    for candidate in outcome.summaries:
        config = simulated_config(described.read(settings_of(candidate, described.read())))
        assert {name: policy.instances for name, policy in config.policies.items()} == dict(
            candidate.instances
        )
        assert {name: policy.trainer.most_ranks for name, policy in config.trained.items()} == dict(
            candidate.ranks
        )
        assert (config.pool.slots, config.training.micro_batch) == (candidate.slots, candidate.micro_batch)  # type: ignore[union-attr]
        assert config.balance.scope == candidate.balance
    assert not space.refusals


def test_numbers_that_do_not_fit_are_left_out_with_their_memory() -> None:
    space = planned_space(scenario(*LARGE_MODEL, "cluster.devices=8", "cluster.device=A100").read())
    assert space.space.policies[SOLVER].ranks[0] > 1
    refusal = next(line for line in space.refusals if line.startswith("policy solver: ranks 1:"))
    assert "GiB of a device's 80.0 GiB (weights 28.4, gradients 28.4, moments 56.7" in refusal


def test_a_model_that_fits_with_no_number_is_refused_with_all_of_them() -> None:
    with pytest.raises(DoesNotFit, match=r"policy solver: an instance on 1: .* of a device's 6.0 GiB"):
        planned_space(scenario(*LARGE_MODEL, f"cluster.device={SMALL_DEVICE}").read())


def test_too_few_devices_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        DoesNotFit, match="2 devices are too few: an instance of each policy needs 2, and the largest"
    ):
        search([], "cluster.devices=2")


def test_a_bound_falls_with_instances_and_slots() -> None:
    model = planned_space(scenario("cluster.devices=8").read()).model
    few = Candidate(
        ((SOLVER, 1), (JUDGE, 1)), ((SOLVER, 1), (JUDGE, 1)), ((SOLVER, 1), (JUDGE, 1)), 1, 4, "intra"
    )
    more = Candidate(((SOLVER, 2), (JUDGE, 2)), few.tensor_parallel, few.ranks, 2, 4, "intra")
    first, second = model.bound(few), model.bound(more)
    assert second.instances_s == pytest.approx(first.instances_s / 2) and second.training_s < first.training_s
    # A trajectory waits a second for its reward, and half a second after each of two calls.
    assert first.slowest_trajectory_s == second.slowest_trajectory_s > 2.0
    assert first.step_s > first.slowest_trajectory_s, "an optimizer step and new weights follow"


def test_the_result_has_the_fastest_and_its_distances() -> None:
    outcome = search([9.0, 8.0, 6.0, 7.0], limit=3)
    text = plan_text(outcome)
    assert text.startswith("6.0 s a step") and "1.50 times as long" in text and "1.17 times as long" in text
    told = json.loads(plan_json(outcome, "best.yaml"))
    assert [row["step_s"] for row in told["simulated"]] == [6.0, 7.0, 8.0]
    assert told["as_it_is"] == {"step_s": 9.0} and told["scenario"] == "best.yaml"


def test_the_result_says_for_how_many_states_a_slot_of_the_fastest_has_memory() -> None:
    outcome = search([9.0, 8.0], limit=1)
    (fastest,) = outcome.summaries
    assert "states_per_slot" not in plan_text(outcome), "there is no second state"
    outcome.summaries[fastest] = figures(8.0, slot_states="pool.states_per_slot=1: 2 states need more")
    assert "  pool.states_per_slot=1: 2 states need more\n" in plan_text(outcome)
    assert json.loads(plan_json(outcome, "best.yaml"))["slot_states"].startswith("pool.states_per_slot=1")


def test_a_stopped_search_has_the_fastest_so_far() -> None:
    outcome = search([9.0, 8.0, 7.0, KeyboardInterrupt()])
    assert outcome.stopped and sorted(outcome.search.seconds.values()) == [7.0, 8.0]
    assert plan_text(outcome).startswith("7.0 s a step") and "(stopped)" in plan_text(outcome)


def test_a_candidate_that_has_no_place_is_left_out_with_the_reason() -> None:
    outcome = search([DoesNotFit(["too large"]), DoesNotFit(["no host has room"]), 7.0], limit=1)
    assert "no host has room" in outcome.refusals[-1] and list(outcome.search.seconds.values()) == [7.0]
    assert "the scenario as it is does not fit: too large" in plan_text(outcome)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"rollout_alone_s": 5.0, "instances_busy": 0.9}, "the instances, 90% busy"),
        ({"rollout_alone_s": 5.0, "instances_busy": 0.1}, "the slowest trajectories"),
        ({"overlap_s": 5.0, "training_busy": 0.8, "instances_busy": 0.5}, "training beside rollouts"),
        ({"overlap_s": 5.0, "training_busy": 0.2, "instances_busy": 0.5}, "rollouts beside training"),
        ({"after_rollout_s": 5.0, "swapping_s": 3.0}, "3.0 s of swaps"),
    ],
)
def test_the_limit_is_the_longest_part_and_its_resource(parts: dict[str, float], words: str) -> None:
    assert words in limit_of(figures(6.0, **parts))
