"""The fused forward of the llama family: the decoder as formulas on the module's own parameters.

    x = embedding[tokens]
    for each layer:   x += out(attention(rotate(norm(qkv(norm(x))))))       heads share keys in groups
                      x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

With small models, the time of a decode step of the Hugging Face module is mostly that of calling many modules and tiny
operations. Here q, k and v are one matrix product, and so are gate and up: their parameters become views of one matrix,
so that weights written through the state dict take effect at once, and no weight is in memory twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..engine import EngineRequest
from .decode_plan import ActiveSequence, DecodePlan, DecodeStep
from .forward import Forward
from .prompt_batch import PromptBatch, PromptPart
from .slot_cache import SlotCache

# Largest difference from the module's logits, as a share of the largest logit: rounding is below, other formulas above.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CHECK_COLUMNS = 8

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Rotations by the token's position alone; those of "dynamic" and "longrope" depend on the longest sequence too.
STATIC_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ATTENTION_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ matrix + bias``; ``matrix``: [in, out], ``bias``: [out] or None."""

    matrix: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return x.mm(self.matrix) if self.bias is None else torch.addmm(self.bias, x, self.matrix)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += self(x)``."""
        residual.addmm_(x, self.matrix)
        if self.bias is not None:
            residual.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """``weight * x / sqrt(mean(x**2) + epsilon)`` (Zhang & Sennrich, "Root Mean Square Layer Normalization").

    ``weight``: [size]; or [kinds, size], one per kind of head, with ``kinds`` (int64 [heads]) the kind of each head.
    """

    weight: Tensor
    epsilon: float
    floor: Tensor  # [], sqrt(size * epsilon)
    kinds: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight if self.kinds is None else self.weight.index_select(0, self.kinds)
        size = x.shape[-1]
        if not _on_cpu_in_float32(x):
            return F.rms_norm(x, (size,), None, self.epsilon).mul_(weight)
        # torch needs eight operations for it on CPUs. |x| is the root of the sum of squares.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor)
        normed: Tensor = x / length.mul_(size**-0.5)
        return normed.mul_(weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. ``qkv``, ``gate_up``: several matrices in one. ``head_norm``: of queries and keys."""

    attention_norm: Norm
    qkv: Linear
    head_norm: Norm | None
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


def _on_cpu_in_float32(tensor: Tensor) -> bool:
    """True if the number of calls costs more than the computation, so that other formulas are faster."""
    return tensor.dtype == torch.float32 and tensor.is_cpu


# (layer, queries [n, tokens, heads, head_dim], keys and values [n, tokens, kv_heads, head_dim])
# -> [n * tokens, heads * head_dim]; tokens is left out when decoding
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class FusedLlamaForward(Forward):
    """The forward of a model without an ``unsupported_reason``, for positions below ``max_context``.

    Parameters of the model become views of joined ones; the model itself still works.
    """

    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        module: Any = model
        decoder, attention = module.model, module.model.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._heads: int = attention.q_proj.out_features // self._head_dim
        self._kv_heads: int = attention.k_proj.out_features // self._head_dim
        self._scale: float = attention.scaling
        kinds = torch.tensor([0] * self._heads + [1] * self._kv_heads, device=model.device)
        self._layers = [_layer(layer, kinds) for layer in decoder.layers]
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._norm = _norm(decoder.norm)
        tied = module.lm_head.weight is decoder.embed_tokens.weight
        self._head = Linear(self._embedding.t(), None) if tied else _join([module.lm_head])
        self._cos, self._sin = _rotations(decoder.rotary_emb, max_context, self._embedding)
        if self._embedding.is_cuda:
            torch.cuda.empty_cache()  # the parameters' former memory

    def prefill(self, cache: SlotCache, batch: PromptBatch) -> Tensor:
        n, tokens = batch.tokens.shape

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = cache.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
            # Causal attention keeps the padding behind a prompt from reaching it.
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                keys,
                values,
                attn_mask=batch.mask,
                is_causal=batch.mask is None,
                scale=self._scale,
                enable_gqa=self._heads != self._kv_heads,
            )
            return attended.transpose(1, 2).reshape(n * tokens, -1)

        cos, sin = self._cos[:tokens], self._sin[:tokens]
        if batch.positions is not None:
            cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        x = self._decoder(batch.tokens, cos, sin, attend)
        last = torch.arange(n, device=batch.lengths.device) * tokens + batch.lengths - 1
        return self._head(self._norm(x.index_select(0, last)))

    def decode(self, cache: SlotCache, inputs: Tensor, step: DecodeStep) -> Tensor:
        n = len(inputs)
        grouped = n, self._kv_heads, self._heads // self._kv_heads, self._head_dim
        cache.write_to(step.cells)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = cache.append(layer, keys, values)
            # Heads that share keys are computed as several query tokens of one head: no key is copied.
            attended = F.scaled_dot_product_attention(
                queries.view(grouped), keys, values, attn_mask=step.mask, scale=self._scale
            )
            return attended.reshape(n, -1)

        positions = step.positions.view(-1)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return self._head(self._norm(self._decoder(inputs.view(-1), cos, sin, attend)))

    def _decoder(self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[tokens, hidden] of ``tokens``, int64 of any shape. ``cos``, ``sin``: [(last of) shape, 1, head_dim]."""
        heads, rotated = self._heads, self._heads + self._kv_heads
        by_head = *tokens.shape, -1, self._head_dim
        x = self._embedding.index_select(0, tokens.reshape(-1))
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm(x)).view(by_head)
            queries_keys, values = qkv[..., :rotated, :], qkv[..., rotated:, :]
            if layer.head_norm is not None:
                queries_keys = layer.head_norm(queries_keys)
            queries_keys = rotate(queries_keys, cos, sin)
            attended = attend(number, queries_keys[..., :heads, :], queries_keys[..., heads:, :], values)
            layer.out.add_to(x, attended)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
            layer.down.add_to(x, F.silu(gate, inplace=True).mul_(up))
        return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., "RoFormer"), number i of a head paired with number i + half.

    ``x``: [..., heads, head_dim]; ``cos``, ``sin``: [..., 1, head_dim], the first half of ``sin`` negated.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


# ---------------------------------------------------------------------------------- from modules to formulas


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """A reason for which ``FusedLlamaForward`` can't compute the forward of ``model``; None if supported."""
    config = model.config
    if config.model_type not in FAMILY or not type(model).__name__.endswith("ForCausalLM"):
        return f"{type(model).__name__} is unknown as a decoder of the llama family"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    module: Any = model
    rotary = getattr(module.model, "rotary_emb", None)
    if rotary is None or rotary.rope_type not in STATIC_ROTATIONS:
        return f"its rotary embedding is {getattr(rotary, 'rope_type', None)}"
    kinds = {(parameter.dtype, parameter.device) for parameter in model.parameters()}
    if len(kinds) > 1 or model.dtype not in TOLERANCE:
        return "its parameters have several dtypes or devices, or an unusual dtype"
    is_linear = type(module.lm_head) is nn.Linear
    if not is_linear or module.lm_head.bias is not None:
        return "its output layer is not a plain matrix"
    for layer in module.model.layers:
        if (problem := _unsupported_layer(layer)) is not None:
            return problem
    return None


def _unsupported_layer(layer: nn.Module) -> str | None:
    parts: Any = layer
    if layer._modules.keys() != _LAYER or parts.mlp._modules.keys() != _MLP:
        return "its layers have other parts"
    if parts.self_attn._modules.keys() - _ATTENTION not in (set(), _ATTENTION_NORMS):
        return "its attention has other parts"
    projections = [part for name, part in layer.named_modules() if name.endswith("_proj")]
    if any(type(part) is not nn.Linear for part in projections):
        return "its linear layers are not plain ones"
    norms = [part for part in layer.modules() if "Norm" in type(part).__name__]
    if not all(hasattr(norm, "variance_epsilon") for norm in norms):
        return "its norms are not root-mean-square norms"
    return None


def _layer(layer: Any, kinds: Tensor) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    if hasattr(attention, "q_norm"):
        norms = [attention.q_norm, attention.k_norm]
        weights = torch.stack([norm.weight.detach() for norm in norms])
        _make_views([norm.weight for norm in norms], list(weights))
        head_norm = _norm(norms[0], weights, kinds)
    return Layer(
        attention_norm=_norm(layer.input_layernorm),
        qkv=_join([attention.q_proj, attention.k_proj, attention.v_proj]),
        head_norm=head_norm,
        out=_join([attention.o_proj]),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_join([mlp.gate_proj, mlp.up_proj]),
        down=_join([mlp.down_proj]),
    )


def _norm(module: Any, weight: Tensor | None = None, kinds: Tensor | None = None) -> Norm:
    weight = module.weight.detach() if weight is None else weight
    epsilon: float = module.variance_epsilon
    floor = torch.tensor((weight.shape[-1] * epsilon) ** 0.5, dtype=weight.dtype, device=weight.device)
    return Norm(weight, epsilon, floor, kinds)


def _join(linears: Sequence[nn.Linear]) -> Linear:
    """Layers with the same input as one layer; their parameters become views of its parameters."""
    joined = torch.cat([linear.weight.detach() for linear in linears])  # [out, in]
    bounds = list(pairwise(accumulate((linear.out_features for linear in linears), initial=0)))
    _make_views([linear.weight for linear in linears], [joined[slice(*rows)] for rows in bounds])
    biases: list[Tensor | None] = [linear.bias for linear in linears]  # None is missing in torch's types
    present = [bias for bias in biases if bias is not None]
    if not present:
        return Linear(joined.t(), None)
    bias = torch.cat([bias.detach() for bias in present])
    _make_views(present, [bias[slice(*rows)] for rows in bounds])
    return Linear(joined.t(), bias)


def _make_views(parameters: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view


def _rotations(rotary: Any, positions: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin`` as ``rotate`` takes them, [positions, 1, head_dim], of the dtype and device of ``weight``."""
    numbers = torch.arange(max(positions, _CHECK_COLUMNS), device=weight.device)
    cos, sin = rotary(weight, numbers.unsqueeze(0))
    first, second = sin.chunk(2, -1)
    return cos[0].unsqueeze(1).contiguous(), torch.cat((-first, second), -1)[0].unsqueeze(1)


# ---------------------------------------------------------------------------------- verification of the formulas


def relative_difference(ours: Forward, theirs: Forward, model: PreTrainedModel) -> float | None:
    """The largest difference between the logits of two forwards, relative to the largest logit.

    Computed for two short prompts of unequal lengths, further tokens of both, and a token behind each. None if the
    weights allow no comparison: all logits are zero, or some are not finite.
    """
    tokens = (np.arange(1, 17).reshape(2, 8) * 7919 % model.config.vocab_size).tolist()
    starts, ends = (4, 2), (6, 5)
    logits = []
    for forward in (theirs, ours):
        cache = SlotCache(2, _CHECK_COLUMNS, model.dtype, model.device)
        for parts in (
            [PromptPart(line[:start]) for line, start in zip(tokens, starts, strict=True)],
            [PromptPart(line[a:b], a) for line, a, b in zip(tokens, starts, ends, strict=True)],
        ):
            batch = PromptBatch.of(parts, cache, 0)
            logits.append(forward.prefill(cache, batch))
        rows = [
            ActiveSequence(EngineRequest("", tuple(line[:end]), 0, 1.0, 2), np.uint64(0), [1])
            for line, end in zip(tokens, ends, strict=True)
        ]
        plan = DecodePlan(rows, cache, model.dtype, model.device)
        logits.append(forward.decode(cache, plan.inputs, plan.next_step))
    expected, computed = (torch.cat(logits[half]).float() for half in (slice(3), slice(3, None)))
    scale = expected.abs().max().item()
    apart = (expected - computed).abs().max().item()
    return apart / scale if 0 < scale < float("inf") else None
