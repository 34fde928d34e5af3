"""The shapes of models, from the headers of files or from their configs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.hosts.host_description import describe_host
from flexmarl.launch.hosts.placement.model_memory import known_shapes, shape_of_model, unknown_shape
from flexmarl.launch.hosts.placement.plan import DoesNotFit
from flexmarl.launch.hosts.placement.run_placement import place_run

SIZES = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 352, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


def test_a_config_is_enough(folder: Path) -> None:
    shape = shape_of_model(ModelConfig(path=str(folder)))
    assert shape is not None
    attention = 64 * (64 + 2 * 32) + 64 + 2 * 32 + 64 * 64
    assert shape.layer_parameters == attention + 3 * 64 * 352 + 2 * 64
    assert shape.outside_parameters == 2 * 512 * 64 + 64
    assert shape.parameters == 3 * shape.layer_parameters + shape.outside_parameters
    assert (shape.largest_tensor, shape.layers, shape.query_size, shape.key_size) == (512 * 64, 3, 64, 32)
    assert shape.is_gated and not shape.norms_heads


def test_files_are_read_before_the_config_and_need_no_torch(folder: Path) -> None:
    save_file({"model.layers.0.a.weight": np.zeros((10, 10), np.float16)}, folder / "model-1.safetensors")
    save_file({"lm_head.weight": np.zeros(20, np.float16)}, folder / "model-2.safetensors")
    shape = shape_of_model(ModelConfig(path=str(folder)), may_import=False)
    assert shape is not None
    assert (shape.parameters, shape.layer_parameters, shape.outside_parameters) == (120, 100, 20)
    (folder / "model-2.safetensors").write_bytes(b"damaged")
    assert shape_of_model(ModelConfig(path=str(folder)), may_import=False) is None


@pytest.mark.parametrize("has_files", [False, True], ids=["config", "files"])
def test_adapters_are_for_no_experts_whether_they_are_one_tensor_or_many(
    folder: Path, has_files: bool
) -> None:
    experts = {
        "model_type": "qwen2_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 96,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(SIZES | experts))
    if has_files:
        shapes = {f"mlp.experts.{n}.gate_proj": (32, 64) for n in range(4)} | {
            "self_attn.q_proj": (64, 64), "mlp.shared_expert.up_proj": (96, 64),
        }  # fmt: skip
        tensors = {
            f"model.layers.0.{name}.weight": np.zeros(size, np.float16) for name, size in shapes.items()
        }
        save_file(tensors, folder / "model.safetensors")
    shape = shape_of_model(ModelConfig(path=str(folder)))
    assert shape is not None
    layers = 1 if has_files else 3
    assert shape.adapter_parameters(8, ["q_proj"]) == 8 * 128 * layers
    assert shape.adapter_parameters(8, ["up_proj"]) == 8 * (64 + 96) * layers
    assert shape.adapter_parameters(8, ["gate_up_proj"]) == 0
    assert shape.adapter_parameters(8, ["gate_proj"]) == (0 if has_files else 8 * (64 + 96) * 3)
    assert (shape.experts, shape.routed, shape.shared) == (2, 4, 96)


@pytest.mark.parametrize(
    ("family", "seen"),
    [("qwen2", (False, False, 0)), ("phi3", (True, True, 0)), ("glm4", (False, True, 0)),
     ("gpt_neox", (True, True, 0)), ("phi", (False, True, 3)), ("gpt2", (False, False, 3))],
)  # fmt: skip
def test_products_rotations_and_activation_functions_are_seen(
    folder: Path, family: str, seen: tuple[bool, bool, int]
) -> None:
    (folder / "config.json").write_text(json.dumps(SIZES | {"model_type": family, "pad_token_id": None}))
    shape = shape_of_model(ModelConfig(path=str(folder)))
    assert shape is not None
    assert (shape.joins_queries, shape.rotates_part, shape.activation_tensors) == seen


def test_a_model_of_a_hub_that_is_not_in_the_cache_is_not_known() -> None:
    assert shape_of_model(ModelConfig(path="Qwen/Qwen2.5-0.5B-Instruct")) is None


def test_tiny_models_on_a_cpu_are_read_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("sort-digits", [])
    with monkeypatch.context() as patched:
        # The launcher of a small run would import torch for it, which takes longer than its training.
        patched.setitem(sys.modules, "flexmarl.actors.model_sources", None)
        assert known_shapes(config) == {}
    assert known_shapes(config, all_models=True).keys() == config.policies.keys()


def test_the_reason_for_which_a_model_has_no_shape_is_that_of_its_library() -> None:
    config = resolve("sort-digits", ["agents.sorter.model.config={model_type: mamba}"])
    name = PolicyName("sorter")
    assert name not in known_shapes(config, all_models=True)
    assert unknown_shape(config, name).startswith(
        "policies.sorter.model.config: the memory that it takes is unknown, as the model can't be built: "
        "MambaForCausalLM does not support an attention implementation"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("num_attention_heads=0", "integer division or modulo by zero"),
        ("hidden_size=-5", "negative dimension -5"),
        ("hidden_size=big", "Field 'hidden_size' expected int, got str"),
    ],
)
def test_impossible_numbers_of_a_config_are_reasons_too(change: str, reason: str) -> None:
    config = resolve("sort-digits", [f"agents.sorter.model.config.{change}"])
    name = PolicyName("sorter")
    assert name not in known_shapes(config, all_models=True)
    assert reason in unknown_shape(config, name)


def test_heads_that_key_heads_do_not_divide_are_refused_by_the_plan() -> None:
    config = resolve("sort-digits", ["agents.sorter.model.config.num_attention_heads=3"])
    with pytest.raises(
        DoesNotFit, match="policies.sorter.model: 2 key heads do not divide the 3 attention heads"
    ):
        place_run(config, [describe_host()], all_models=True)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, 3),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, 2),
        ({"model_type": "mistral", "sliding_window": 64}, 0),
    ],
)
def test_layers_with_a_window_keep_no_more_than_that(
    folder: Path, changes: dict[str, object], layers: int
) -> None:
    (folder / "config.json").write_text(json.dumps(SIZES | changes))
    shape = shape_of_model(ModelConfig(path=str(folder)))
    assert shape is not None and shape.full_layers == layers
