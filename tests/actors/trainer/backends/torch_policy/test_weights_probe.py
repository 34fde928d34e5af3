"""The probe that a trainer publishes, and what an engine with the same weights, or with others, answers."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flexmarl.actors.errors import TooManyTokens
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.inference.weights_proof import (
    PROBE_BOUNDS,
    Answer,
    are_proven,
    least_difference,
    other_choices,
)
from flexmarl.actors.messages import LikelyTokens, LoraConfig
from flexmarl.actors.names import PolicyName
from flexmarl.actors.pretrained import empty_model
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.backends.torch_policy.weights_probe import PROMPT_TOKENS, PROMPTS, draw_prompts
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .policies import make_samples
from .ranks import Ranks, gang_setup, made_policy

DAPO = {"name": "dapo"}
PLAIN = gang_setup(DAPO, num_hidden_layers=2).model_copy(update={"probe_every": 1})
SETUPS = {
    "plain": PLAIN,
    "tied": gang_setup(DAPO, tie_word_embeddings=True),
    "bfloat16": gang_setup(DAPO, dtype="bfloat16", num_hidden_layers=2),
    "padded": gang_setup(DAPO, trainer={"name": "torch", "packing": False}),
    "recomputed": gang_setup(DAPO, trainer={"name": "torch", "activation_checkpointing": True}),
    "merged": gang_setup(DAPO, lora=LoraConfig(rank=3, alpha=7)),
}


def setup_of(kind: str) -> PolicySetup:
    return SETUPS[kind].model_copy(update={"probe_every": 1})


def policy_of(setup: PolicySetup) -> TorchPolicy:
    return made_policy(ALONE, setup, None)


def engine_of(setup: PolicySetup, weights: Mapping[str, Any], **options: Any) -> TransformersEngine:
    engine = TransformersEngine(empty_model(setup.real_model), (), max_batch=4, **options)
    for name, tensor in engine.weights().items():
        tensor.copy_(weights[name])
    engine.weights_loaded(engine.weights())
    return engine


def differences(
    setup: PolicySetup, weights: Mapping[str, Any], probe: tuple[LikelyTokens, ...]
) -> list[float]:
    engine = engine_of(setup, weights)
    for number, expected in enumerate(probe):
        engine.add(EngineRequest(str(number), expected.prompt, 0, 0.0, 1))
    answers: dict[str, EngineResult] = {}
    while engine.pending:
        answers |= {result.request_id: result for result in engine.step()}
    return [
        least_difference(expected, answers[str(number)].tokens[0], answers[str(number)].logprobs[0])
        for number, expected in enumerate(probe)
    ]


@pytest.mark.parametrize("kind", SETUPS)
def test_an_engine_with_the_published_weights_agrees(kind: str) -> None:
    setup = setup_of(kind)
    policy = policy_of(setup)
    policy.accumulate(make_samples(1))
    policy.optimizer_step()
    probe = policy.probe()
    assert len(probe) == PROMPTS
    measured = differences(setup, policy.weights(), probe)
    rounding = 1e-4 if setup.real_model.dtype == "float32" else PROBE_BOUNDS["bfloat16"] / 3
    assert max(measured) < rounding, measured


@pytest.mark.parametrize(
    "tensor",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_an_engine_without_one_tensor_does_not(tensor: str) -> None:
    policy = policy_of(PLAIN)
    weights = {name: array.clone() for name, array in policy.weights().items()}
    weights[tensor].zero_()
    assert max(differences(PLAIN, weights, policy.probe())) > PROBE_BOUNDS["float32"]


def test_an_engine_with_the_version_before_does_not() -> None:
    policy = policy_of(PLAIN)
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    policy.accumulate(make_samples(1))
    policy.optimizer_step()
    assert max(differences(PLAIN, before, policy.probe())) > PROBE_BOUNDS["float32"]


def test_a_probe_leaves_the_policy_as_it_is() -> None:
    probed, other = policy_of(PLAIN), policy_of(PLAIN)
    for policy in (probed, other):
        policy.accumulate(make_samples(1)[:4])
        if policy is probed:
            policy.probe()
        policy.accumulate(make_samples(1)[4:])
        policy.optimizer_step()
    for name, tensor in probed.weights().items():
        assert torch.equal(tensor, other.weights()[name]), name


def test_only_every_so_many_versions_have_one() -> None:
    policy = policy_of(PLAIN.model_copy(update={"probe_every": 2}))
    probes = [policy.probe()]
    for version in range(3):
        policy.accumulate(make_samples(version, version=version))
        policy.optimizer_step()
        probes.append(policy.probe())
    assert [bool(probe) for probe in probes] == [True, False, True, False]
    assert policy_of(PLAIN.model_copy(update={"probe_every": 0})).probe() == ()


def test_weights_that_are_not_finite_have_none() -> None:
    policy = policy_of(PLAIN)
    policy.base_state()["model/model.norm.weight"].fill_(float("nan"))
    assert policy.probe() == ()


def test_each_version_has_prompts_of_its_own_the_same_in_all_processes() -> None:
    name = PolicyName("solver")
    prompts = draw_prompts(name, 3, 1000)
    assert prompts == draw_prompts(name, 3, 1000) != draw_prompts(name, 4, 1000)
    assert prompts != draw_prompts(PolicyName("judge"), 3, 1000)
    assert {len(prompt) for prompt in prompts} == {PROMPT_TOKENS}
    assert max(map(max, prompts)) < 1000


def probe_twice(gang: GangRank, setup: PolicySetup) -> list[tuple[LikelyTokens, ...]]:
    """Before and after a change of the weights without a forward, as when a state is loaded."""
    policy = made_policy(gang, setup, None)
    probes = [policy.probe()]
    for name, tensor in policy.base_state().items():
        if name.startswith(("model/", "adapter_model/")):
            tensor.add_(0.05)
    return [*probes, policy.probe()]


@pytest.mark.parametrize("kind", ["plain", "tied", "bfloat16", "merged"])
def test_all_ranks_of_a_gang_have_the_probe_of_one_rank(ranks: Ranks, kind: str) -> None:
    setup = setup_of(kind)
    expected = probe_twice(ALONE, setup)
    gang: list[Any] = ranks.run(2, probe_twice, setup)
    assert gang[0] == gang[1]
    assert expected[0][0].logprobs != expected[1][0].logprobs
    tolerance = 1e-5 if setup.real_model.dtype == "float32" else PROBE_BOUNDS["bfloat16"] / 3
    for probe, of_one in zip(gang[0], expected, strict=True):
        for answer, reference in zip(probe, of_one, strict=True):
            assert least_difference(reference, answer.tokens[0], answer.logprobs[0]) < tolerance


# ----------------------------------------------------------------------- mixtures of experts


MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 32, "mlp_only_layers": [1],
}  # fmt: skip
GROUPS: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 3, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
MIXTURES = {
    "float32": gang_setup(DAPO, **MIXTURE),
    "bfloat16": gang_setup(DAPO, dtype="bfloat16", **MIXTURE),
    "padded": gang_setup(DAPO, trainer={"name": "torch", "packing": False}, **MIXTURE),
    "recomputed": gang_setup(DAPO, trainer={"name": "torch", "activation_checkpointing": True}, **MIXTURE),
    "merged": gang_setup(DAPO, lora=LoraConfig(rank=3, alpha=7, targets=("q_proj",)), **MIXTURE),
    "groups": gang_setup(DAPO, **GROUPS),
}


def mixture_of(setup: PolicySetup) -> TorchPolicy:
    """Its weights are larger than those of an untrained model, whose experts hardly differ."""
    policy = policy_of(setup.model_copy(update={"probe_every": 1}))
    for name, tensor in policy.base_state().items():
        if name.startswith(("model/", "adapter_model/")) and tensor.ndim > 1:
            tensor.mul_(4)
    return policy


def replays(engine: TransformersEngine, probe: tuple[LikelyTokens, ...]) -> list[Answer]:
    every = []
    for expected in probe:
        assert expected.routes is not None
        routes = expected.routes.array()
        result = engine.replay(expected.prompt, routes)
        assert result is not None and result.routes is not None
        difference = least_difference(expected, result.tokens[0], result.logprobs[0])
        every.append(Answer(difference, other_choices(routes, result.routes), replayed=True))
    return every


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("kind", MIXTURES)
def test_an_engine_of_experts_that_replays_the_trainers_agrees(kind: str, records: bool) -> None:
    setup = MIXTURES[kind]
    policy = mixture_of(setup)
    policy.accumulate(make_samples(1))
    policy.optimizer_step()
    probe = policy.probe()
    answers = replays(engine_of(setup, policy.weights(), records_routes=records), probe)
    exact = setup.real_model.dtype == "float32"
    assert are_proven(answers, 1e-3 if exact else PROBE_BOUNDS["bfloat16"] / 3)
    assert all(len(answer.other_choices) == 3 for answer in answers)
    if exact:
        assert not any(any(answer.other_choices) for answer in answers)


def test_a_trainer_that_replays_routes_probes_with_its_own() -> None:
    plain = MIXTURES["float32"]
    model = plain.real_model.model_copy(update={"router_replay": True})
    replaying = plain.model_copy(update={"model": model})
    probes = [mixture_of(setup).probe() for setup in (plain, replaying)]
    for first, second in zip(*probes, strict=True):
        assert first == second and first.routes is not None and second.routes is not None
        assert np.array_equal(first.routes.array(), second.routes.array())


def probed_routes(gang: GangRank, setup: PolicySetup) -> tuple[list[NDArray[Any]], bool]:
    """Also: the routers have their own forward again."""
    policy = made_policy(gang, setup.model_copy(update={"probe_every": 1}), None)
    routes = [probed.routes.array().copy() for probed in policy.probe() if probed.routes is not None]
    return routes, all("forward" not in vars(part) for part in policy.models.completions.model.modules())


def test_all_ranks_of_a_gang_record_the_routes_of_one_rank(ranks: Ranks) -> None:
    setup = MIXTURES["float32"]
    expected, _ = probed_routes(ALONE, setup)
    assert len(expected) == PROMPTS
    for routes, are_restored in ranks.run(2, probed_routes, setup):
        assert np.array_equal(routes, expected) and are_restored


def test_routers_whose_choice_is_not_seen_have_a_probe_without_routes() -> None:
    config: dict[str, Any] = {"model_type": "phimoe", "num_local_experts": 4, "num_hidden_layers": 2}
    probe = policy_of(gang_setup(DAPO, **config).model_copy(update={"probe_every": 1})).probe()
    assert len(probe) == PROMPTS and all(probed.routes is None for probed in probe)


def test_a_choice_that_rounding_turns_changes_a_log_probability_unless_it_is_replayed() -> None:
    """Two experts have the same scores but for rounding, which prefers the other one in the engine."""
    setup = gang_setup(DAPO, **MIXTURE | {"num_experts_per_tok": 3})
    policy = mixture_of(setup)
    gates = [
        tensor
        for name, tensor in policy.base_state().items()
        if name.startswith("model/") and ".gate." in name
    ]
    for gate in gates:
        gate[8:] = gate[:8] + 1e-6
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
    for name, tensor in weights.items():
        if ".gate." in name:
            tensor[8:] -= 2e-6
    probe = policy.probe()
    assert max(differences(setup, weights, probe)) > PROBE_BOUNDS["float32"]
    answers = replays(engine_of(setup, weights), probe)
    assert max(answer.difference for answer in answers) < PROBE_BOUNDS["float32"] / 10
    assert any(any(answer.other_choices) for answer in answers)


@pytest.mark.parametrize("damage", ["zero", "other"])
@pytest.mark.parametrize(
    ("kind", "part"),
    [*product(["float32", "bfloat16", "groups"], ["experts", "gate.weight"]), ("groups", "bias")],
)
def test_a_wrong_expert_and_a_wrong_router_are_seen_all_the_same(part: str, damage: str, kind: str) -> None:
    setup = MIXTURES[kind]
    policy = mixture_of(setup)
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
    if part == "bias":  # it decides about the choice alone
        policy.models.completions.model.model.layers[2].mlp.gate.e_score_correction_bias.normal_(std=2.0)
    names = [name for name in weights if "layers.2." in name and part in name]
    assert names or part == "bias"
    for name in names:
        weights[name].copy_(torch.zeros(()) if damage == "zero" else weights[name].flip(0))
    answers = replays(engine_of(setup, weights), policy.probe())
    assert not are_proven(answers, PROBE_BOUNDS[setup.real_model.dtype])


def test_a_device_without_memory_for_a_probe_names_the_settings_that_take_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = policy_of(PLAIN)

    def fail(*_args: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 980.00 MiB")

    monkeypatch.setattr(policy.models.completions, "likeliest", fail)
    with pytest.raises(TooManyTokens, match=r"tokens_per_forward=.*\. CUDA out of memory"):
        policy.probe()
