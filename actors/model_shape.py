"""The sizes of a model that decide about memory, from the shapes of its tensors and its config. Pure, without torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

_OF_A_LAYER: Final = re.compile(r"(.+?\.\d+)\.")
EXPERTS_OF_A_TOKEN: Final = ("num_experts_per_tok", "experts_per_token", "moe_topk", "top_k_experts")
"""The names of the number of experts that compute a token, in the configs of models."""

_EXPERTS_OF_A_LAYER: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WITHOUT_FUSED_NORMS: Final = ("gemma", "vaultgemma")
"""Their norms multiply by one more than the weight."""

_JOINED_QUERIES: Final = (".qkv_proj.", ".query_key_value.")
"""Products that give queries, keys and values at once."""
_ACTIVATIONS: Final = ("hidden_act", "activation_function", "hidden_activation")
ACTIVATION_TENSORS: Final = {
    "quick_gelu": 1, "gelu_10": 1, "gelu_new": 3, "gelu_accurate": 3, "gelu_python_tanh": 3, "gelu_python": 3,
    "gelu_fast": 6, "relu2": 1, "laplace": 1,
}  # fmt: skip
"""Tensors that autograd keeps of an activation function, beside its input and its result: transformers computes these
in several operations, and all others (silu, gelu, relu, gelu_pytorch_tanh) in one."""

_NOT_LINEAR: Final = ("embed", "lm_head", "wte", "wpe")
_LINEAR_IS_QUANTIZABLE_DIMENSIONS: Final = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. Counts of parameters have those that are shared by several names (tied weights) once.

    ``layer_parameters``: of the largest layer; ``outside_parameters``: of all that is in no layer, such as embeddings;
    ``largest_tensor``: elements. ``linear_parameters``: of the weights that an engine may quantise. ``adapted``: by the
    end of the name of each linear layer in all layers, the sum of its inputs and outputs: an adapter of rank r has r
    times as many parameters. ``experts``: that compute a token, 1 without any; ``routed``: those of a layer that it is
    routed to, 0 without any. ``intermediate``: of each expert; ``shared``: of those that compute every token, together.
    ``norms``: of a token in a layer; ``fuses_norms``: the trainer computes them in one pass (``fuse_norms``).
    ``full_layers``: those that keep keys and values of all tokens as they are; 0 if that is unknown.
    ``joins_queries``: one product gives queries, keys and values, and the first two are rotated then; ``rotates_part``:
    of a head at most, which is joined with the rest. ``activation_tensors``: see ``ACTIVATION_TENSORS``.
    """

    parameters: int
    layers: int
    layer_parameters: int
    outside_parameters: int
    largest_tensor: int
    linear_parameters: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    context: int
    experts: int
    is_gated: bool
    norms_heads: bool
    adapted: tuple[tuple[str, int], ...]
    routed: int = 0
    shared: int = 0
    norms: int = 2
    fuses_norms: bool = True
    full_layers: int = 0
    joins_queries: bool = False
    rotates_part: bool = False
    activation_tensors: int = 0

    @property
    def query_size(self) -> int:
        """Elements of a token's queries in a layer."""
        return self.heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Elements of a token's keys in a layer; its values have as many."""
        return self.key_heads * self.head_dim

    def key_value_bytes(self, item_bytes: int) -> int:
        """Bytes that a token's keys and values take in all layers."""
        return 2 * self.layers * self.key_size * item_bytes

    def adapter_parameters(self, rank: int, targets: Sequence[str] | str) -> int:
        """Parameters of a LoRA adapter. ``targets``: as in ``LoraConfig``."""
        chosen = [size for name, size in self.adapted if targets == "all-linear" or name in targets]
        return rank * sum(chosen)


def shape_of(tensors: Mapping[str, Sequence[int]], architecture: Any) -> ModelShape:
    """``tensors``: the shapes of a model's weights by name, tied ones once. ``architecture``: its config, of
    transformers."""
    text = architecture.get_text_config(decoder=True)
    sizes = {name: prod(shape) for name, shape in tensors.items()}
    layers: dict[str, int] = {}
    outside = linear = 0
    adapted: dict[str, int] = {}
    shared: dict[str, int] = {}
    norms: dict[str, int] = {}
    for name, size in sizes.items():
        layer = _OF_A_LAYER.match(name)
        if layer is None:
            outside += size
        else:
            layers[layer[1]] = layers.get(layer[1], 0) + size
            if "norm" in name and name.endswith(".weight") and tuple(tensors[name]) == (text.hidden_size,):
                norms[layer[1]] = norms.get(layer[1], 0) + 1
            if "shared_expert" in name and name.endswith(".up_proj.weight"):
                shared[layer[1]] = shared.get(layer[1], 0) + tensors[name][0]
        if len(tensors[name]) >= _LINEAR_IS_QUANTIZABLE_DIMENSIONS and not any(
            word in name for word in _NOT_LINEAR
        ):
            linear += size
            if _is_of_experts(name):  # one tensor of all, or many in files: no layer of an adapter
                continue
            leaf = name.removesuffix(".weight").rpartition(".")[2]
            adapted[leaf] = adapted.get(leaf, 0) + sum(tensors[name][-2:])
    rotation = getattr(text, "rope_parameters", None) or {}
    activations = (getattr(text, key, None) for key in _ACTIVATIONS)
    heads = int(text.num_attention_heads)
    hidden = int(text.hidden_size)
    return ModelShape(
        parameters=sum(sizes.values()),
        layers=int(text.num_hidden_layers),
        layer_parameters=max(layers.values(), default=0),
        outside_parameters=outside,
        largest_tensor=max(sizes.values(), default=0),
        linear_parameters=linear,
        hidden=hidden,
        intermediate=_first(text, ("moe_intermediate_size", "intermediate_size", "n_inner"), 4 * hidden),
        heads=heads,
        key_heads=_first(text, ("num_key_value_heads",), heads),
        head_dim=_first(text, ("head_dim",), hidden // heads),
        vocabulary=int(text.vocab_size),
        context=_first(text, ("max_position_embeddings",), 0),
        experts=_first(text, EXPERTS_OF_A_TOKEN, 1),
        is_gated=any("gate_proj" in name or "gate_up_proj" in name for name in tensors),
        norms_heads=any("q_norm" in name for name in tensors),
        adapted=tuple(sorted(adapted.items())),
        routed=_first(text, _EXPERTS_OF_A_LAYER, 0) if _first(text, EXPERTS_OF_A_TOKEN, 0) else 0,
        shared=max(shared.values(), default=0),
        norms=max(norms.values(), default=2),
        fuses_norms=not text.model_type.startswith(_WITHOUT_FUSED_NORMS),
        full_layers=_full_layers(text),
        joins_queries=bool(rotation) and any(part in name for name in tensors for part in _JOINED_QUERIES),
        rotates_part="partial_rotary_factor" in rotation,
        activation_tensors=max(ACTIVATION_TENSORS.get(str(name), 0) for name in activations),
    )


def _full_layers(text: Any) -> int:
    if getattr(text, "kv_lora_rank", None):  # it keeps what keys and values are computed from
        return 0
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return sum(kind == "full_attention" for kind in kinds)
    return 0 if getattr(text, "sliding_window", None) else int(text.num_hidden_layers)


def _is_of_experts(name: str) -> bool:
    return ".experts." in name


def _first(config: Any, names: Sequence[str], default: int) -> int:
    """The first of these numbers that a config has."""
    return next((int(value) for name in names if (value := getattr(config, name, None))), default)
