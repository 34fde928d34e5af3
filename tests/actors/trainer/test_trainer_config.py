"""Algorithms by name: their numbers, refusals, streaming, and credit assignment beside a loss."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.trainer.objective.transforms import sync_warning
from flexmarl.actors.trainer.trainer_config import LossConfig, credit_problem
from flexmarl.launch.hosts import env

from .algorithm import Algorithm, algorithm


def loss(**given: Any) -> LossConfig:
    return algorithm(**given).loss


def test_without_a_word_it_is_grpo_as_in_its_paper() -> None:
    default = algorithm()
    assert default == Algorithm(CreditConfig(), LossConfig())
    credit, of_policy = default.credit, default.loss
    assert (credit.name, of_policy.name) == ("grpo", "grpo")
    assert (of_policy.clip_low, of_policy.clip_high) == (0.2, 0.2)
    assert (credit.scale_rewards, of_policy.aggregation) == (True, "sequence_mean")
    assert (of_policy.correction, of_policy.correction_low, of_policy.correction_high) == (
        "tis",
        None,
        2.0,
    )
    assert of_policy.kl_coefficient == 0.0 and of_policy.streams


def test_no_two_algorithms_are_the_same() -> None:
    rows = [replace(row, paper="") for row in ALGORITHMS.values()]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_brings_its_papers_numbers_and_what_is_given_wins(name: str) -> None:
    both, row = algorithm(name=name), ALGORITHMS[name]
    found = both.loss
    assert (found.clip_low, found.clip_high) == (row.clip_low, row.clip_high)
    assert (found.aggregation, found.kl_estimator) == (row.aggregation, row.kl_estimator)
    assert both.credit.scale_rewards == bool(row.scale_rewards)
    assert found.options == dict(row.options)
    if row.has_ratio and not row.options:
        assert loss(name=name, clip_low=0.125).clip_low == 0.125
    assert "arXiv" in row.paper


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "decoupled"])
def test_a_resolved_config_resolves_to_itself(name: str, correction: str) -> None:
    found = algorithm(name=name, correction=correction, kl_coefficient=0.01)
    for half in (found.credit, found.loss):
        assert type(half).model_validate(half.model_dump(mode="json")) == half
        assert type(half).model_validate_json(half.model_dump_json()) == half


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "ppo", "critic": None}, "ppo wants a critic"),
        ({"name": "ppo", "critic": {"lam": 1.5}}, "less than or equal to 1"),
        ({"name": "ppo", "scale_rewards": True}, "does not divide"),
        ({"name": "grpo", "critic": {}}, "grpo has no critic"),
        ({"name": "grpo", "baseline_decay": 0.9}, "grpo has no running mean"),
        ({"name": "rae", "baseline_decay": 1.0}, "less than 1"),
        ({"name": "rae", "kl_in_reward": True, "kl_coefficient": 0.1}, "rae has its KL in the loss"),
        ({"name": "grpoo"}, "'grpo', 'dr_grpo'"),
        ({"name": ["grpo"]}, "'grpo', 'dr_grpo'"),
        ({"name": "rloo", "clip_high": 0.2}, "rloo clips nothing"),
        ({"name": "reinforce_pp", "scale_rewards": True}, "does not divide"),
        ({"name": "dapo", "kl_in_reward": True}, "dapo has its KL in the loss"),
        ({"kl_estimator": "k1", "kl_coefficient": 0.1}, "zero on average"),
        ({"constant_length": 8}, "aggregation constant"),
        ({"correction": "none", "correction_high": 2.0}, "want a correction"),
        ({"correction": "tis", "correction_low": 0.5}, "no lower bound"),
        ({"correction": "icepop", "correction_low": 6.0}, "less than correction_high"),
        ({"name": "echo", "clip_high": 0.2}, "echo has options in place of clip_low and clip_high"),
        (
            {"name": "echo", "options": {"kapa": 3.0}},
            "options.kapa: echo has no such option; there are: least, greatest, kappa, tail",
        ),
        (
            {"name": "grpo", "options": {"kappa": 3.0}},
            "options.kappa: grpo has no such option; leave options out",
        ),
        ({"name": "habc", "options": {"temperature": 0}}, "options.temperature=0 must be greater than 0"),
        ({"name": "echo", "options": {"kappa": math.nan}}, "Input should be a finite number"),
        (
            {"name": "echo", "options": {"least": 0.3}},
            "options.least=0.3 is greater than options.greatest=0.2",
        ),
        ({"correction": "truncate"}, "'none', 'tis'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        algorithm(**given)


def test_what_needs_the_whole_batch_does_not_stream_and_says_why() -> None:
    streams = {name for name in ALGORITHMS if loss(name=name).streams}
    assert ALGORITHMS.keys() - streams == {"reinforce_pp", "reinforce_pp_baseline"}
    assert loss(name="ppo", kl_coefficient=0.1).kl_in_reward and loss(name="ppo", kl_coefficient=0.1).streams
    assert loss(name="grpo", kl_coefficient=0.1).streams
    assert not loss(name="rloo", kl_coefficient=0.1).streams
    assert loss(name="rloo", kl_coefficient=0.1, kl_in_reward=False, kl_estimator="k3").streams
    for name in ALGORITHMS:
        found = loss(name=name)
        if (reason := found.whole_batch_reason) is not None:
            words = sync_warning("solver", found.name, reason)
            assert (
                words.startswith(f"policy solver: {name} can't train") and reason in words and "sync" in words
            )


def test_a_critic_has_numbers_of_its_own() -> None:
    critic = loss(name="ppo", critic={"lr": 1e-4}).critic
    assert critic is not None and (critic.lr, critic.gamma, critic.lam) == (1e-4, 1.0, 0.95)
    assert loss(name="grpo").critic is None


def test_the_constant_is_the_longest_completion_unless_given() -> None:
    assert loss(name="dr_grpo").with_constant_length(64).constant_length == 64
    assert loss(name="dr_grpo", constant_length=9).with_constant_length(64).constant_length == 9
    assert loss().with_constant_length(64).constant_length is None


def test_reading_a_config_does_not_import_torch() -> None:
    program = "import flexmarl.actors.trainer.trainer_config, sys; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=env.actor_environment(), check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"


FITS = {  # the algorithms that an agent may have on a policy with this one
    **dict.fromkeys(ALGORITHMS, ALGORITHMS.keys() - {"ppo", "reinforce_pp", "reinforce_pp_baseline"}),
    "ppo": {"ppo"},
    "reinforce_pp": {"reinforce_pp", "reinforce_pp_baseline"},
    "reinforce_pp_baseline": {"reinforce_pp", "reinforce_pp_baseline"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_credit_and_loss_agree_on_critic_and_normalisation(name: str) -> None:
    found = {
        agents
        for agents in ALGORITHMS
        if credit_problem(algorithm(name=agents).credit, loss(name=name)) is None
    }
    assert found == FITS[name]


def test_a_kl_in_the_rewards_is_for_agents_whose_rewards_can_have_one() -> None:
    penalised = loss(name="rloo", kl_coefficient=0.1)
    assert credit_problem(algorithm(name="rloo").credit, penalised) is None
    problem = credit_problem(algorithm(name="grpo").credit, penalised)
    assert problem == "has no place for the KL that the policy's rloo puts into the rewards (kl_in_reward)"
    in_loss = loss(name="rloo", kl_coefficient=0.1, kl_in_reward=False, kl_estimator="k3")
    assert credit_problem(algorithm(name="grpo").credit, in_loss) is None


@pytest.mark.parametrize(
    ("given", "used", "grouping"),
    [
        ({"name": "grpo"}, None, "trajectory"),
        ({"name": "grpo", "rewards": "trajectory"}, "trajectory", "trajectory"),
        ({"name": "grpo", "rewards": "both"}, "both", "agent_turns"),
        ({"name": "rloo", "rewards": "turn"}, "turn", "agent_turns"),
        ({"name": "at_grpo"}, "both", "turn"),
        ({"name": "at_grpo", "rewards": "trajectory"}, "trajectory", "turn"),
        ({"name": "dr_mas"}, "both", "agent_turns"),
        ({"name": "ppo"}, "both", "agent_turns"),
    ],
)
def test_rewards_of_turns_are_compared_by_turns(
    given: dict[str, Any], used: str | None, grouping: str
) -> None:
    credit = algorithm(**given).credit
    assert (credit.used_rewards, credit.grouping) == (used, grouping)
