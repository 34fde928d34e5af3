"""The plan's memory of the host for a policy's states is that of a policy which is built."""

from dataclasses import astuple, replace
from typing import Any

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.model_shape import shape_of
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.rank_bytes import LEAST_LOGITS_BYTES, RANGE_BYTES, RankLoad, rank_bytes
from flexmarl.actors.trainer.trainer_config import LossConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.hosts.placement.training_bytes import (
    Cards,
    HostStateBytes,
    host_state_bytes,
    load_of,
    shape_problems,
)

from .hosts import GIB, shape

MODEL = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 64,
}  # fmt: skip


def built_policy(dtype: str, loss: dict[str, Any]) -> TorchPolicy:
    model = ModelConfig(config=MODEL, tokenizer="unused", dtype=dtype)
    setup = PolicySetup(model=model, credit={AgentName("solver"): CreditConfig()}, loss=LossConfig(**loss))
    return TorchPolicy(PolicyName("solver"), setup, seed=0, total_steps=10)


def lent_bytes(policy: TorchPolicy) -> HostStateBytes:
    """Twice the published weights, and once the rest of the base part and the gradient."""
    published = policy.weights()
    addresses = {tensor.data_ptr() for tensor in published.values()}
    rest = [tensor for tensor in policy.base_state().values() if tensor.data_ptr() not in addresses]
    return HostStateBytes(
        2 * sum(tensor.nbytes for tensor in published.values()),
        sum(tensor.nbytes for tensor in rest),
        sum(tensor.nbytes for tensor in policy.gradients().values()),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "loss",
    [{"name": "grpo"}, {"name": "grpo", "kl_coefficient": 0.1}, {"name": "ppo"}],
    ids=["plain", "kl", "critic"],
)
def test_states_in_the_hosts_memory_are_those_of_a_policy(dtype: str, loss: dict[str, Any]) -> None:
    policy = built_policy(dtype, loss)
    shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
    built = shape_of(shapes, policy.model.config)
    load = RankLoad(
        ranks=1, tokens=64, item_bytes=4 if dtype == "float32" else 2, logits_bytes=LEAST_LOGITS_BYTES,
        has_reference="kl_coefficient" in loss, has_critic=loss["name"] == "ppo",
    )  # fmt: skip
    assert astuple(host_state_bytes(built, load)) == pytest.approx(astuple(lent_bytes(policy)), rel=0.01)


def test_a_policy_that_may_change_its_ranks_is_planned_with_its_whole_base_part() -> None:
    """On one rank its weights in float32 are the published ones, and its newer rest on two is 4 bytes larger."""
    policy = built_policy("float32", {"name": "grpo"})
    shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
    load = RankLoad(ranks=2, tokens=64, item_bytes=4, logits_bytes=LEAST_LOGITS_BYTES)
    planned = host_state_bytes(shape_of(shapes, policy.model.config), load)
    base = sum(tensor.nbytes for tensor in policy.base_state().values())
    assert planned.rest == pytest.approx(base, rel=0.01)
    assert base - lent_bytes(policy).rest == pytest.approx(planned.published / 2, rel=0.01)


def test_a_policy_of_one_rank_is_planned_with_a_range_of_its_weights_in_a_shared_pool_alone() -> None:
    """In bfloat16 on a device: a static pool has the weights of a version, and two that lie there."""
    sizes = shape(10**9)
    publishing = []
    for pool in ("pool={name: shared, slots: 1}", "pool.name=static"):
        config = resolve("sort-digits", [pool, "agent_defaults.model.device=cuda"])
        load = load_of(config, config.policies[PolicyName("sorter")], sizes, Cards(80 * GIB, 80 * GIB))
        assert load is not None
        publishing.append(rank_bytes(sizes, load).publishing)
    assert publishing == [RANGE_BYTES, 3 * 2 * 10**9]


@pytest.mark.parametrize(
    ("devices", "options", "allowed"),
    [
        (2, "{}", ""),
        (3, "{}", "1, 2, 4, 28"),
        (7, "{}", "1, 2, 4, 28"),  # it divides the 28 heads
        (14, "{enable_expert_parallel: true}", "1, 2, 4, 28"),  # not a model with experts
    ],
)
def test_devices_divide_heads_key_heads_and_columns(devices: int, options: str, allowed: str) -> None:
    engine = f"{{name: vllm, tensor_parallel: {devices}, options: {options}}}"
    config = resolve("sort-digits", [f"agents.sorter.engine={engine}", "agent_defaults.model.device=cuda"])
    sizes = replace(shape(10**9), heads=28, key_heads=4, intermediate=28 * 64)
    problems = list(shape_problems(config, {PolicyName("sorter"): sizes}))
    assert [problem.rpartition("take one of ")[2] for problem in problems] == [allowed] * bool(allowed)
    narrow = list(shape_problems(config, {PolicyName("sorter"): replace(sizes, intermediate=4 * 61)}))
    assert all(problem.endswith("take one of 1, 2, 4") for problem in narrow)


def test_experts_may_be_divided_as_wholes() -> None:
    sizes = replace(shape(10**9), heads=32, key_heads=4, intermediate=100, experts=8)
    for options, count in (("{}", 1), ("{enable_expert_parallel: true}", 0)):
        engine = f"{{name: vllm, tensor_parallel: 8, options: {options}}}"
        config = resolve(
            "sort-digits", [f"agents.sorter.engine={engine}", "agent_defaults.model.device=cuda"]
        )
        assert len(list(shape_problems(config, {PolicyName("sorter"): sizes}))) == count


@pytest.mark.parametrize(
    ("engine", "needed"),
    [
        ("kv_cache_bytes: 10485760", None),  # 2 x 10 layers x 4 heads of 64 x 2 bytes x 1024 tokens
        ("kv_cache_bytes: 10485759", 10485760),
        ("kv_cache_bytes: 5242880, tensor_parallel: 2", None),
        ("kv_cache_bytes: 5242880, options: {kv_cache_dtype: fp8}", None),
    ],
)
def test_one_sequence_has_to_fit_the_keys_and_values_of_vllm(engine: str, needed: int | None) -> None:
    settings = [f"agents.sorter.engine={{name: vllm, max_context: 1024, {engine}}}"]
    config = resolve("sort-digits", [*settings, "agent_defaults.model.device=cuda"])
    problems = list(shape_problems(config, {PolicyName("sorter"): replace(shape(10**9), full_layers=10)}))
    assert [f"one sequence of 1024 tokens takes {needed} on" in text for text in problems] == [True] * bool(
        needed
    )
