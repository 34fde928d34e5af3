"""The probe that a trainer publishes, and what an engine with the same weights, or with others, answers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from flexmarl.actors.errors import TooManyTokens
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.inference.weights_proof import PROBE_BOUNDS, least_difference
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


def differences(
    setup: PolicySetup, weights: Mapping[str, Any], probe: tuple[LikelyTokens, ...]
) -> list[float]:
    engine = TransformersEngine(empty_model(setup.real_model), (), max_batch=4)
    for name, tensor in engine.weights().items():
        tensor.copy_(weights[name])
    engine.weights_loaded(engine.weights())
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
    found = differences(setup, policy.weights(), probe)
    rounding = 1e-4 if setup.real_model.dtype == "float32" else PROBE_BOUNDS["bfloat16"] / 3
    assert max(found) < rounding, found


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
        for found, reference in zip(probe, of_one, strict=True):
            assert least_difference(reference, found.tokens[0], found.logprobs[0]) < tolerance


def test_a_device_without_memory_for_a_probe_names_the_settings_that_take_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = policy_of(PLAIN)

    def fail(*_args: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 980.00 MiB")

    monkeypatch.setattr(policy.models.completions, "likeliest", fail)
    with pytest.raises(TooManyTokens, match=r"tokens_per_forward=.*\. CUDA out of memory"):
        policy.probe()
