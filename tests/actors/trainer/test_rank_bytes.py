"""The memory of a rank as it is predicted, beside measurements: on a CPU those of this test, on a GPU recorded ones."""

import gc
from dataclasses import replace
from unittest import mock

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.model_shape import ModelShape, shape_of
from flexmarl.actors.model_sources import architecture_of
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.pretrained import named_weights_of
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.torch_policy import completion_model
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.rank_bytes import (
    RANGE_BYTES,
    RankLoad,
    layer_token_bytes,
    logits_limit,
    rank_bytes,
)
from flexmarl.actors.trainer.trainer_config import LossConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from scripts.bench.memory_peaks import peak_bytes

ROWS, PROMPT, COMPLETION = 8, 16, 112
CHUNK = 128


def model(vocabulary: int, layers: int, tied: bool = True, dtype: str = "float32") -> ModelConfig:
    sizes = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 352, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return ModelConfig(config=sizes, tokenizer="unused", dtype=dtype)


def shape(config: ModelConfig) -> ModelShape:
    weights = {name: tuple(tensor.shape) for name, tensor in named_weights_of(config).items()}
    return shape_of(weights, architecture_of(config))


def samples(version: int) -> list[Sample]:
    agent = AgentName("solver")
    return [
        Sample(
            f"1:q_0_{n}", agent, 1, version, "1:q", float(n % 2), n % 2 - 0.5, (1,) * PROMPT, (2,) * COMPLETION,
            (-3.0,) * COMPLETION, ROWS,
        )
        for n in range(ROWS)
    ]  # fmt: skip


def measured_forward(config: ModelConfig, checkpoints: bool, loss: LossConfig | None = None) -> int:
    """Bytes beyond the state, in a forward and its backward."""
    trainer = TorchTrainerConfig(activation_checkpointing=checkpoints)
    setup = PolicySetup(
        model=config, trainer=trainer, credit={AgentName("solver"): CreditConfig()}, loss=loss or LossConfig()
    )
    policy = TorchPolicy(PolicyName("solver"), setup, seed=0, total_steps=9)
    policy.accumulate(samples(0))  # what libraries allocate once
    policy.optimizer_step()
    gc.collect()
    return peak_bytes(lambda: policy.accumulate(samples(1)))


@pytest.mark.parametrize(
    ("vocabulary", "layers", "checkpoints", "dtype"),
    [
        (4096, 2, False, "float32"),
        (4096, 2, True, "bfloat16"),
        (4096, 6, False, "bfloat16"),
        (4096, 6, True, "float32"),
        (256, 4, False, "float32"),
        (256, 4, True, "bfloat16"),
    ],
)
def test_a_forward_takes_what_is_predicted(
    vocabulary: int, layers: int, checkpoints: bool, dtype: str
) -> None:
    config = model(vocabulary, layers, dtype=dtype)
    limit = CHUNK * 4 * vocabulary
    load = RankLoad(1, ROWS * (PROMPT + COMPLETION), 2 if dtype == "bfloat16" else 4, limit, checkpoints)
    predicted = rank_bytes(shape(config), load)
    with mock.patch.object(completion_model, "most_logits_bytes", lambda _device: limit):
        measured = measured_forward(config, checkpoints)
    assert 0.9 <= measured / (predicted.forward - predicted.state) <= 1.1


FAMILIES: dict[str, dict[str, object]] = {
    "gemma3": {"model_type": "gemma3_text", "intermediate_size": 512, "sliding_window": 512, "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "intermediate_size": 512, "moe_intermediate_size": 64, "num_experts": 16,
        "num_experts_per_tok": 8, "head_dim": 32,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", "intermediate_size": 512, "moe_intermediate_size": 64, "num_experts": 16,
        "num_experts_per_tok": 4, "shared_expert_intermediate_size": 256,
    },
    "gpt2": {
        "model_type": "gpt2", "num_key_value_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "phi3": {"model_type": "phi3", "intermediate_size": 512},
    "phi": {"model_type": "phi", "intermediate_size": 512},
}  # fmt: skip
"""Norms that are not fused, twice as many of them; experts that tokens are routed to, and shared ones; an activation
function in several operations; queries, keys and values of one product; heads that are rotated in part."""


@pytest.mark.parametrize(
    ("family", "checkpoints", "dtype"),
    [
        ("gemma3", False, "bfloat16"),
        ("gemma3", True, "bfloat16"),
        ("gemma3", False, "float32"),
        ("qwen3_moe", False, "float32"),
        ("qwen3_moe", True, "bfloat16"),
        ("qwen2_moe", False, "bfloat16"),
        ("qwen2_moe", True, "float32"),
        ("gpt2", False, "float32"),
        ("gpt2", True, "bfloat16"),
        ("phi3", False, "bfloat16"),
        ("phi3", True, "float32"),
        ("phi", False, "float32"),
    ],
)
def test_layers_of_other_families_take_what_is_predicted(family: str, checkpoints: bool, dtype: str) -> None:
    sizes = {
        "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 256, "tie_word_embeddings": False, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = ModelConfig(config=sizes | FAMILIES[family], tokenizer="unused", dtype=dtype)
    limit = CHUNK * 4 * 256
    load = RankLoad(1, ROWS * (PROMPT + COMPLETION), 2 if dtype == "bfloat16" else 4, limit, checkpoints)
    predicted = rank_bytes(shape(config), load)
    with mock.patch.object(completion_model, "most_logits_bytes", lambda _device: limit):
        measured = measured_forward(config, checkpoints)
    assert 0.9 <= measured / (predicted.forward - predicted.state) <= 1.1


def test_an_entropy_bonus_takes_no_more_logits() -> None:
    config, limit = model(4096, 2), CHUNK * 4 * 4096
    predicted = rank_bytes(
        shape(config), RankLoad(1, ROWS * (PROMPT + COMPLETION), 4, limit, has_entropy=True)
    )
    with mock.patch.object(completion_model, "most_logits_bytes", lambda _device: limit):
        plain = measured_forward(config, False)
        measured = measured_forward(config, False, LossConfig(entropy_coefficient=0.1))
    assert measured <= plain + limit // 4
    assert measured <= 1.1 * (predicted.forward - predicted.state)
    compiled = RankLoad(1, ROWS * (PROMPT + COMPLETION), 4, limit, is_compiled=True, has_entropy=True)
    assert rank_bytes(shape(config), compiled).logits == predicted.logits, "it is not compiled"


QWEN_HALF_BILLION = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
H200_BYTES = 150_109_880_320


def test_the_peak_on_an_h200_was_what_is_predicted() -> None:
    """The peak of all tensors as ``scripts/gpu/battery T5`` recorded it: 64 samples of 1024 tokens, 16384 a forward, in
    float32 with checkpointing. Those of bfloat16 were recorded with a residual stream of float32."""
    config = ModelConfig(config=QWEN_HALF_BILLION, tokenizer="unused")
    load = RankLoad(1, 16384, 4, logits_limit(H200_BYTES), is_compiled=True, has_checkpoints=True)
    assert 16.51e9 / rank_bytes(shape(config), load).forward == pytest.approx(1.0, abs=0.01)


def test_the_state_is_divided_and_the_base_of_an_adapter_too() -> None:
    sizes = shape(model(512, 3, tied=False))
    alone = rank_bytes(sizes, RankLoad(1, 64, 2, 1 << 20))
    assert alone.state == 16 * sizes.parameters
    four = rank_bytes(sizes, RankLoad(4, 64, 2, 1 << 20))
    assert four.state == pytest.approx(alone.state / 4, rel=1e-4)
    adapter = rank_bytes(sizes, RankLoad(4, 64, 2, 1 << 20, adapter=(8, "all-linear")))
    assert adapter.frozen == pytest.approx(2 * sizes.parameters / 4, rel=1e-4), "in bfloat16"
    single = rank_bytes(sizes, RankLoad(1, 64, 4, 1 << 20, adapter=(8, "all-linear")))
    assert single.frozen == 4 * sizes.parameters
    assert adapter.weights * 4 == pytest.approx(4 * sizes.adapter_parameters(8, "all-linear"), rel=1e-3)
    assert sizes.adapter_parameters(8, ("q_proj",)) == 3 * 8 * (64 + 64)


def test_reference_and_critic_come_on_top() -> None:
    sizes = shape(model(512, 3))
    plain = rank_bytes(sizes, RankLoad(2, 64, 2, 1 << 20))
    both = rank_bytes(sizes, RankLoad(2, 64, 2, 1 << 20, has_reference=True, has_critic=True))
    body = sizes.parameters - 512 * 64 + 64
    assert both.state - plain.state == pytest.approx(8 * body + sizes.parameters, rel=1e-3)


@pytest.mark.parametrize("adapter", [None, (8, "all-linear")], ids=["whole", "adapter"])
def test_one_rank_publishes_a_copy_in_a_static_pool_and_a_range_in_a_shared_one(
    adapter: tuple[int, str] | None,
) -> None:
    sizes = shape(model(600_000, 3))
    copy = 2 * sizes.parameters
    assert copy > RANGE_BYTES
    merging = 0 if adapter is None else 3 * 4 * sizes.hidden * sizes.intermediate
    static = RankLoad(1, 64, 2, 1 << 20, adapter=adapter)
    assert rank_bytes(sizes, static).publishing == copy + merging
    assert rank_bytes(sizes, replace(static, publishes=2)).publishing == 3 * copy + merging
    shared = replace(static, in_shared_pool=True)
    assert rank_bytes(sizes, shared).publishing == RANGE_BYTES + merging


def test_weights_that_are_published_live_take_nothing_beside_their_versions() -> None:
    sizes = shape(model(512, 3))
    for load in (RankLoad(1, 64, 4, 1 << 20), RankLoad(1, 64, 4, 1 << 20, in_shared_pool=True)):
        assert rank_bytes(sizes, load).publishing == 0
    assert rank_bytes(sizes, RankLoad(1, 64, 4, 1 << 20, publishes=2)).publishing == 8 * sizes.parameters


def test_a_rank_of_a_replica_has_the_bytes_of_a_rank_of_as_many() -> None:
    sizes = shape(model(512, 3))
    for changes in ({}, {"has_reference": True, "has_critic": True}, {"adapter": (8, "all-linear")}):
        two, hybrid = (RankLoad(ranks, 64, 2, 1 << 20, replicas=ranks // 2, **changes) for ranks in (2, 4))
        assert rank_bytes(sizes, hybrid) == rank_bytes(sizes, two)


def test_a_compiled_layer_keeps_less() -> None:
    sizes = shape(model(512, 3))
    plain, compiled = (RankLoad(1, 64, 2, 1 << 20, is_compiled=is_compiled) for is_compiled in (False, True))
    assert layer_token_bytes(sizes, compiled) < layer_token_bytes(sizes, plain)
    assert rank_bytes(sizes, compiled).logits * 2 == rank_bytes(sizes, plain).logits


def test_a_gpu_has_larger_chunks_of_logits_up_to_a_limit() -> None:
    assert logits_limit(None) == logits_limit(4 << 30) == 128 << 20
    assert logits_limit(80 << 30) == 80 << 24
    assert logits_limit(1 << 40) == 2 << 30
