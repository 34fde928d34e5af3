"""Policies of their own and shared ones: as they are written, as they resolve, as they are refused."""

import re

import pytest
import yaml

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.launch.config.config_reading import check, resolve, to_yaml
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run.role_setups import orchestrator_plan, policy_setups

from ..conftest import TINY

SOLVER, CHECKER = AgentName("solver"), AgentName("checker")
SHARED = PolicyName("shared")
ONE_POLICY = ("policies={shared: {}}", "agents={solver: {policy: shared}, checker: {policy: shared}}")


def tiny(*overrides: str) -> RunConfig:
    return resolve(str(TINY), overrides)


def shared(*overrides: str) -> RunConfig:
    return tiny(*ONE_POLICY, *overrides)


# --------------------------------------------------------------------------- agents with a policy of their own


def test_an_agent_with_a_model_defines_a_policy_of_its_name() -> None:
    config = tiny(
        "agents.checker.optimizer.lr=1e-4", "agents.checker.algorithm={name: rloo, kl_coefficient: 0.1}"
    )
    assert [*config.policies] == ["solver", "checker"] == [*map(str, config.agents)]
    assert {agent: config.policy_of(agent) for agent in config.agents} == {
        SOLVER: "solver",
        CHECKER: "checker",
    }
    assert config.agents_of(PolicyName("checker")) == (CHECKER,)
    policy = config.policies[PolicyName("checker")]
    assert (policy.optimizer.lr, policy.algorithm.name, policy.algorithm.kl_coefficient) == (
        1e-4,
        "rloo",
        0.1,
    )
    assert config.agents[CHECKER].algorithm.name == "rloo"
    assert config.policies[PolicyName("solver")].algorithm.name == "grpo"


def test_one_algorithm_section_is_divided_between_credit_and_loss() -> None:
    config = tiny("agents.solver.algorithm={name: dapo, scale_rewards: false, clip_high: 0.5}")
    assert not config.agents[SOLVER].algorithm.scale_rewards
    assert config.policies[PolicyName("solver")].algorithm.clip_high == 0.5
    assert (
        config.agents[SOLVER].algorithm.name == config.policies[PolicyName("solver")].algorithm.name == "dapo"
    )


def test_an_agent_may_use_the_policy_of_another() -> None:
    config = tiny("agents={checker: {policy: solver}, solver: {}}")
    assert list(config.policies) == ["solver"]
    assert config.agents_of(PolicyName("solver")) == (CHECKER, SOLVER)
    with pytest.raises(ConfigError, match=r"agents\.checker\.optimizer: .*: write agents\.solver\.optimizer"):
        tiny("agents={checker: {policy: solver, optimizer: {lr: 1}}, solver: {}}")
    with pytest.raises(ConfigError, match=r"agents\.solver\.global_batch=1 is less than"):
        tiny("mode=async", "agents={checker: {policy: solver}, solver: {global_batch: 1}}")


# --------------------------------------------------------------------------- shared policies


def test_defaults_are_for_policies_and_agents_alike() -> None:
    config = shared("agent_defaults.optimizer.lr=2e-4", "agent_defaults.sampling.temperature=0.5")
    assert config.policies[SHARED].optimizer.lr == 2e-4
    assert config.policies[SHARED].real_model.config is not None, "the model is agent_defaults'"
    assert {agent.sampling.temperature for agent in config.agents.values()} == {0.5}
    assert config.agents_of(SHARED) == (SOLVER, CHECKER)
    whole = tiny("policies={shared: {}}", "agent_defaults.policy=shared")
    assert whole == shared(), "the policy's name may be a default too"


def test_a_default_policy_is_set_aside_by_null() -> None:
    config = tiny("policies={shared: {}}", "agent_defaults.policy=shared", "agents.checker.policy=null")
    assert [agent.policy for agent in config.agents.values()] == ["shared", "checker"]
    assert list(config.policies) == ["shared", "checker"]


def test_an_agent_takes_its_policys_algorithm_unless_it_names_its_own() -> None:
    config = shared("policies.shared.algorithm.name=gspo", "agents.checker.algorithm.name=at_grpo")
    assert config.policies[SHARED].algorithm.name == "gspo"
    assert [agent.algorithm.name for agent in config.agents.values()] == ["gspo", "at_grpo"]
    defaulted = shared("agent_defaults.algorithm={name: dapo, scale_rewards: false}")
    assert defaulted.policies[SHARED].algorithm.name == "dapo"
    assert {agent.algorithm.name for agent in defaulted.agents.values()} == {"dapo"}
    assert {agent.algorithm.scale_rewards for agent in defaulted.agents.values()} == {False}
    changed = shared("agent_defaults.algorithm.name=dapo", "policies.shared.algorithm.name=ppo")
    assert {agent.algorithm.name for agent in changed.agents.values()} == {"ppo"}


def test_the_trainer_gets_each_policy_with_the_credit_of_its_agents() -> None:
    config = shared("policies.shared.algorithm.name=dr_grpo", "agents.solver.sampling.max_new_tokens=9")
    setup = policy_setups(config)[SHARED]
    assert list(setup.credit) == [SOLVER, CHECKER]
    assert setup.loss.constant_length == 9, "the longest completion of any agent"
    assert config.policies[SHARED].sft.batches == 0
    late = shared(
        "mode=async", "policies.shared.global_batch=6", "policies.shared.algorithm.name=reinforce_pp"
    )
    assert orchestrator_plan(late).global_batch == {"shared": 6} and orchestrator_plan(late).whole_step == (
        "shared",
    )


@pytest.mark.parametrize("overrides", [(), ONE_POLICY, ("agents={checker: {policy: solver}, solver: {}}",)])
def test_the_resolved_config_resolves_to_itself(overrides: tuple[str, ...]) -> None:
    config = tiny(*overrides, "agent_defaults.algorithm={name: ppo, critic: {lr: 1.0e-4}}")
    written = to_yaml(config)
    again = check(yaml.safe_load(written), "config.yaml")
    assert again == config and to_yaml(again) == written


# --------------------------------------------------------------------------- refusals


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        tiny(*overrides)
    head, *problems = str(caught.value).splitlines()
    assert head.endswith("overrides included:")
    return "\n".join(problem.strip() for problem in problems)


BOTH = "agents={solver: {policy: shared}, checker: {policy: shared}}"
MIXED = "agents={solver: {policy: shared}, checker: {policy: shared, %s}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("policies={shared: {}}", "agents={solver: {policy: shard}, checker: {policy: shared}}"),
            "agents.solver.policy='shard': there is no such policy; there are: shared. Write one of them, or add "
            "policies.shard with a model",
        ),
        (
            ("agents={solver: {policy: shared}}",),
            "agents.solver.policy='shared': there is no such policy: add policies.shared with a model",
        ),
        (
            ("policies={shared: {}, other: {}}", BOTH),
            "policies.other: no agent uses it: write `policy: other` in an agent, or leave policies.other out",
        ),
        (
            ("policies={shared: {}}", MIXED % "model: {path: x, config: null}"),
            "agents.checker.model: a setting of policy 'shared', for all agents that use it: write "
            "policies.shared.model, or leave agents.checker.policy out",
        ),
        (
            ("policies={shared: {}}", MIXED % "model: {tokenizer: other}"),
            "agents.checker.model: a setting of policy 'shared', for all agents that use it: write "
            "policies.shared.model, or leave agents.checker.policy out",
        ),
        (
            ("policies={shared: {}}", MIXED % "algorithm: {name: grpo, clip_high: 0.5}"),
            "agents.checker.algorithm.clip_high: a setting of policy 'shared', for all agents that use it: write "
            "policies.shared.algorithm.clip_high",
        ),
        *(
            (
                ("policies={shared: {}}", MIXED % f"{key}: 1"),
                f"agents.checker.{key}: a setting of policy 'shared', for all agents that use it: write "
                f"policies.shared.{key}",
            )
            for key in ("optimizer", "instances", "engine", "sft", "global_batch")
        ),
        (
            ("agent_defaults=null", "agents={solver: {}}"),
            "agents.solver: neither `model` nor `policy`: give it a model, or write `policy: NAME`",
        ),
        (
            ("policies={solver: {}}",),
            "policies.solver: agent 'solver' names no policy, so that it has one of its own of the same name: write "
            "`policy: solver` in agents.solver to use policies.solver, or give policies.solver another name",
        ),
        (
            ("policies={shared: {sampling: {temperature: 0.5}}}", BOTH),
            "policies.shared.sampling: a setting of agents, each has its own: write agents.solver.sampling",
        ),
        (
            ("policies={shared: {algorithm: {scale_rewards: false}}}", BOTH),
            "policies.shared.algorithm.scale_rewards: a setting of agents, each has its own: write "
            "agents.solver.algorithm.scale_rewards",
        ),
        (
            ("policies=5",),
            "policies=5: is a number, needs a section of keys: write `name: {}` for each, without a dash",
        ),
        (
            ("policies={Bad-Name: {}}", "agent_defaults.policy=Bad-Name"),
            "policy name 'Bad-Name': lower-case letters, digits and _, at most 32, a letter first",
        ),
        (
            ("policies={shared: {}}", MIXED % "algorithm: {name: ppo}"),
            "agents.checker.algorithm.name=ppo takes its advantages from a critic, and the policy's grpo has none: "
            "write grpo here too, or give agent 'checker' a policy of its own",
        ),
        (
            ("policies={shared: {algorithm: {name: ppo}}}", MIXED % "algorithm: {name: rloo}"),
            "agents.checker.algorithm.name=rloo does not take its advantages from the critic that the policy's ppo "
            "trains: write ppo here too, or give agent 'checker' a policy of its own",
        ),
    ],
)  # fmt: skip
def test_of_a_mistake_the_name_and_the_remedy_are_given(overrides: tuple[str, ...], message: str) -> None:
    assert refusal(*overrides) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "agents.solver.foo=1",
            "agents.solver.foo: .* allowed: policy, sampling, algorithm, columns, model,",
        ),
        (
            "agents.solver.algorithm.foo=1",
            "agents.solver.algorithm.foo: .* allowed: name, scale_rewards, rewards, .* clip_low",
        ),
        ("agents.solver.algorithm.name=foo", "^agents.solver.algorithm.name='foo': [^\n]*$"),
        ("agents.solver.algorithm=5", "^agents.solver.algorithm=5: [^\n]*$"),
        ("agents={solver: {policy: [1]}}", r"agents.solver.policy=\[1\]: .* valid string"),
    ],
)
def test_an_agents_own_policy_is_named_as_it_is_written(overrides: str, message: str) -> None:
    found = refusal(overrides)
    assert re.search(message, found), found


def test_a_misspelt_policy_is_no_further_policy() -> None:
    with pytest.raises(ConfigError, match="there is no policy 'shard'; there are: shared"):
        shared("policies.shard.instances=2")


def test_settings_of_a_shared_policy_are_refused_by_their_own_key() -> None:
    with pytest.raises(ConfigError, match=r"policies\.shared\.optimizer\.lr=0: .* greater than 0"):
        shared("policies.shared.optimizer.lr=0")
    with pytest.raises(ConfigError, match=r"policies\.shared\.global_batch=4 is for mode=async"):
        shared("policies.shared.global_batch=4")


# --------------------------------------------------------------------------- several updates a step


def test_every_policy_has_the_updates_of_a_step() -> None:
    config = tiny("training.updates=2")
    assert {setup.updates for setup in policy_setups(config).values()} == {2}
    assert {setup.updates for setup in policy_setups(tiny()).values()} == {1}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["training.updates=3"], r"training\.updates=3 is more than training\.queries_per_step=2"),
        (
            ["training.updates=2", "agent_defaults.algorithm.name=rloo"],
            r"training\.updates=2: .*algorithm\.name=rloo has no ratio",
        ),
        (
            ["agent_defaults.algorithm.name=rae", "agent_defaults.algorithm.old_policy=behaviour"],
            "rae has no ratio to another policy",
        ),
        (
            ["agent_defaults.algorithm={old_policy: behaviour, correction: tis}"],
            "old_policy behaviour has the engine's probabilities in its ratio",
        ),
    ],
)
def test_updates_and_old_policies_that_an_algorithm_can_not_use_are_refused(
    settings: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        tiny(*settings)


def test_the_behaviour_policy_needs_no_correction() -> None:
    loss = tiny("agent_defaults.algorithm.old_policy=behaviour").policies[PolicyName("solver")].algorithm
    assert (loss.correction, loss.correction_low, loss.correction_high) == ("none", None, None)
