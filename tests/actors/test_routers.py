"""Choices of routers, recorded in one model and replayed in another, for the architectures that have them."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flexmarl.actors.errors import UnsupportedModel
from flexmarl.actors.routers import ReplayedRoutes, RouteRecorder, _Choice, replay_routes, try_routers

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
EXPERTS = 8
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": EXPERTS},
    "olmoe": {"num_experts": EXPERTS},
    "deepseek_v3": LATENT | {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1},
    "deepseek_v2": LATENT | {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1},
    "glm4_moe": {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "granitemoe": {"num_local_experts": EXPERTS},
    "ernie4_5_moe": {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_layer_start_index": 1},
    "minimax_m2": {"num_local_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS, "sliding_window": 16},
}
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def made(architecture: str, **changes: Any) -> Any:
    """The same weights at every call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SIZES | ARCHITECTURES.get(architecture, {}) | changes)
    model = AutoModelForCausalLM.from_config(config).train(False)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return model


def logits(model: Any, experts: torch.Tensor | None = None) -> torch.Tensor:
    if experts is None:
        computed: torch.Tensor = model(IDS, use_cache=False).logits
        return computed
    routes = ReplayedRoutes(experts)
    computed = model(IDS, use_cache=False, expert_routes=routes).logits
    assert routes.was_read
    return computed


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_replayed_choice_has_the_weights_and_gradients_of_its_own_scores(architecture: str) -> None:
    model = made(architecture)
    plain = logits(model)
    recorder = RouteRecorder(model)
    assert torch.equal(logits(model), plain)
    routes = recorder.take().to(torch.int16)
    assert routes.shape == (IDS.numel(), 3, 2) and recorder.shape == (3, 2)
    of_layers = [layer for layer in range(3) if routes[:, layer].any()]
    assert of_layers == (
        [0, 1, 2] if len(of_layers) == 3 else [0, 2] if architecture == "qwen3_moe" else [1, 2]
    )
    assert len(set(routes[:, of_layers].ravel().tolist())) > EXPERTS // 2, "most experts have tokens"

    replaying = made(architecture)
    replay_routes(replaying)
    assert torch.equal(logits(replaying), plain), "without routes the routers choose"
    assert torch.equal(logits(replaying, routes), plain)
    assert torch.equal(logits(replaying, torch.full_like(routes, -1)), plain)
    neighbours = (routes + 1) % EXPERTS
    changed = logits(replaying, neighbours)
    assert not torch.allclose(changed, plain, atol=1e-3)
    torch.autograd.backward(changed.square().sum())
    gates = [
        parameter
        for name, parameter in replaying.named_parameters()
        if name.endswith((".gate.weight", "router.weight", "router.layer.weight"))
    ]
    assert len(gates) == len(of_layers)
    assert all(gate.grad is not None and gate.grad.abs().sum() > 0 for gate in gates)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_trial_without_weights_follows_the_same_routers(architecture: str) -> None:
    reached, leave = [], _Choice.__exit__

    def note(choice: _Choice, *arguments: Any) -> None:
        reached.append(choice.experts)
        leave(choice, *arguments)  # type: ignore[no-untyped-call]

    model = made(architecture).to("meta")
    with patch.object(_Choice, "__exit__", note):
        try_routers(model)
    assert [experts is not None and experts.shape for experts in reached] == [(2, 2)], (
        "of the first router alone"
    )


def test_half_of_the_tokens_may_be_known() -> None:
    recorded, replaying = made("mixtral"), made("mixtral")
    recorder = RouteRecorder(recorded)
    plain = logits(recorded)
    routes = (recorder.take().to(torch.int16) + 1) % EXPERTS
    routes[: IDS.shape[1]] = -1
    replay_routes(replaying)
    changed = logits(replaying, routes)
    assert torch.allclose(changed[0], plain[0], atol=1e-5)
    assert not torch.allclose(changed[1], plain[1], atol=1e-3)


def test_groups_of_experts_are_no_choice_of_experts() -> None:
    grouped = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    model = made("deepseek_v3", **grouped)
    recorder = RouteRecorder(model)
    logits(model)
    chosen = recorder.take()[:, 1:]
    assert (chosen[..., 0] != chosen[..., 1]).all()


@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])
def test_an_expert_of_a_group_that_the_router_leaves_out_has_its_weight(architecture: str) -> None:
    """DeepSeek-V2 weighs by scores that are 0 in the groups that it leaves out."""
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "topk_method": "group_limited_greedy"}
    recorded, replaying = made(architecture, **groups), made(architecture, **groups)
    recorder = RouteRecorder(recorded)
    logits(recorded)
    routes = recorder.take().to(torch.int16)
    replay_routes(replaying)
    weights: list[torch.Tensor] = []
    gates = [part for name, part in replaying.named_modules() if name.endswith(".gate")]
    for gate in gates:
        gate.register_forward_hook(lambda _, __, output: weights.append(output[1]))
    neighbours = (routes + 4) % 8  # of another group
    neighbours[: len(neighbours) // 2] = -1
    logits(replaying, neighbours)
    assert len(weights) == len(gates) == 2
    assert all((weight > 0).all() for weight in weights)


def test_a_result_of_topk_that_is_read_by_name_is_replayed_too() -> None:
    class NamedTopKRouter(torch.nn.Module):
        num_experts, top_k = EXPERTS, 2

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.topk(hidden, self.top_k, dim=-1).indices

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = NamedTopKRouter()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            chosen: torch.Tensor = self.gate(hidden)
            return chosen

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Layer()])
    replay_routes(model)
    experts = torch.tensor([[[3, 1]], [[-1, -1]]], dtype=torch.int16)
    hidden = torch.arange(2.0 * EXPERTS).view(2, EXPERTS)
    chosen = model.layers[0](hidden, expert_routes=ReplayedRoutes(experts))
    assert chosen.tolist() == [[3, 1], [EXPERTS - 1, EXPERTS - 2]]


def test_models_whose_choice_is_not_seen_are_refused_by_name() -> None:
    dense = made("qwen3")
    with pytest.raises(UnsupportedModel, match="Qwen3ForCausalLM: router_replay is for mixtures of experts"):
        RouteRecorder(dense)
    mixer = made("phimoe", num_local_experts=EXPERTS)
    recorder = RouteRecorder(mixer)
    logits(mixer)
    with pytest.raises(UnsupportedModel, match=r"can't follow the choice of its router model\.layers\.0\."):
        recorder.take()
    for model, words in (
        (dense, "is for mixtures"),
        (made("phimoe", num_local_experts=EXPERTS), "can't follow"),
    ):
        with pytest.raises(UnsupportedModel, match=words):
            try_routers(model.to("meta"))


def test_layers_without_the_arguments_of_their_model_are_refused() -> None:
    model = made("mixtral").to("meta")
    forward = model.model.forward
    model.model.forward = lambda *args, expert_routes, **settings: forward(*args, **settings)
    with pytest.raises(UnsupportedModel, match="MixtralForCausalLM: .* do not get the arguments"):
        try_routers(model)


def test_a_model_of_many_experts_has_wide_routes() -> None:
    model = made("qwen3_moe", num_experts=300)
    recorder = RouteRecorder(model)
    logits(model)
    routes = recorder.take()
    assert routes.dtype == recorder.dtype == torch.int16 and routes.max() > 255
