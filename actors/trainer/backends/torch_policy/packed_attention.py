"""Attention over rows that lie end to end in one: each token sees the earlier ones of its own row.

A decoder computes everything else of a token from that token alone, so attention is all that divides such a row. A
mask would do it on any device, but attention would then be computed between all rows: 16 rows took up to three times
as long as padded ones.

There are two ways, both registered with transformers. ``GROUPED`` is torch's attention over a few groups of rows of
similar length, padded for attention alone; rows that are as long need no copy. ``VARLEN`` is the kernel of flash
attention for variable lengths, for half precision on a GPU. Rows that are padded already are attended to as by ``sdpa``
without a mask: causal attention never looks right.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .....core.telemetry import get_logger
from ...padding import Packing, PaddedRows, RowGroup, pack_rows

log = get_logger(__name__)

GROUPED: Final = "flexmarl_grouped"
VARLEN: Final = "flexmarl_varlen"

_TOLERANCE: Final = 2e-2
"""Relative error of bfloat16 attention and its gradients: a kernel that mixes up rows is off by about 1."""

_SILENT: Final = frozenset({"nemotron"})
"""Models whose layers accept arguments for their attention, and drop them."""

Attention = tuple[Tensor, None]
"""``[batch, tokens, heads, head_dim]``, and no weights of the attention."""

_keep_eager: Callable[[Callable[..., Attention]], Callable[..., Attention]] = torch.compiler.disable
"""A compiled layer leaves this function out: it would be compiled again for every mixture of lengths."""


class _Unviewed(torch.autograd.Function):
    """A tensor without the view that it is, in the same memory.

    A compiled layer has guards for the tensor that a view is of: behind each way to attend, whose outputs are views
    of other tensors, and again for a single row, it would be compiled once more, which takes seconds of a step.
    """

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


_unviewed: Callable[[Tensor], Tensor] = _Unviewed.apply


def pack_attention(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """True if ``model`` computes rows that lie end to end from now on, with activations of ``dtype`` on ``device``;
    the reason why it can't is logged once."""
    reason = packing_obstacle(model)
    if reason is not None:
        _log_once(
            "samples are padded: this model can't compute them end to end", type(model).__name__, reason
        )
        return False
    model.set_attn_implementation(GROUPED)
    if device.type == "cuda" and dtype != torch.float32:
        reason = varlen_obstacle(device, dtype, *_heads(model.config.get_text_config(decoder=True)))
        if reason is None:
            model.set_attn_implementation(VARLEN)
        else:
            _log_once("attention pads packed samples: no variable lengths", type(model).__name__, reason)
    return True


def packing_obstacle(model: Any) -> str | None:
    """The reason why rows of ``model`` must be padded; None if each token sees others by causal attention alone, over
    all earlier ones, through transformers' ``AttentionInterface``."""
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None)
    other_types = sorted(set(layer_types or ()) - {"full_attention"})
    if other_types:
        return f"it has layers of type {', '.join(other_types)}"
    if model._is_stateful:
        return "it carries a state from token to token"
    if not (model._supports_attention_backend and model._supports_sdpa):
        return "it has its own attention code (no AttentionInterface)"
    if not model._supports_flash_attn:
        return "its attention needs a mask"
    if config.model_type in _SILENT:
        return "it gives its attention no arguments of a caller"
    if model.config._attn_implementation not in ("sdpa", GROUPED, VARLEN):
        return f"its attention is {model.config._attn_implementation}"
    if getattr(config, "sliding_window", None) is not None and layer_types is None:
        return "it has a sliding window"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention is in chunks"
    if getattr(config, "alibi", False):
        return "its attention has a bias by distance"
    return None


@cache
def _log_once(event: str, model: str, reason: str) -> None:
    log.info(event, model=model, reason=reason)


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, key heads, and their size."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, size


# ----------------------------------------------------------------------- rows in groups


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **settings: Any,
) -> Attention:
    """``query``, ``key``, ``value``: ``[batch, heads, tokens, head_dim]``; the batch is 1 with a ``packing``."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    return _attend_groups(module, query, key, value, attention_mask, packing, settings)


@_keep_eager
def _attend_groups(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing,
    settings: dict[str, Any],
) -> Attention:
    _note_read(packing, module, attention_mask, settings)
    attend = partial(sdpa_attention_forward, module, attention_mask=None, **settings)
    parts = [_attend_group(attend, group, query, key, value) for group in packing.groups]
    return _unviewed(parts[0]) if len(parts) == 1 else torch.cat(parts, 1), None


def _attend_group(
    attend: Callable[..., Attention], group: RowGroup, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """``[1, group.stop - group.start, heads, head_dim]``."""
    rows, _ = attend(*(_pad_group(tensor, group) for tensor in (query, key, value)))
    tokens = rows.flatten(0, 1)
    return (tokens if group.cells is None else tokens.index_select(0, group.cells)).unsqueeze(0)


def _pad_group(packed: Tensor, group: RowGroup) -> Tensor:
    """``[1, heads, T, head_dim]`` to the group's ``[rows, heads, longest, head_dim]``."""
    tokens = packed[0, :, group.start : group.stop].transpose(0, 1)
    if group.cells is not None:
        cells = tokens.new_zeros(group.rows * group.longest, *tokens.shape[1:])
        tokens = cells.index_copy_(0, group.cells, tokens)
    rows: Tensor = torch.unflatten(tokens, 0, (group.rows, group.longest))
    return rows.transpose(1, 2)


def check_read(rows: PaddedRows, model: nn.Module) -> None:
    """Raises RuntimeError for a ``model`` that has computed packed ``rows`` without telling its attention so."""
    if rows.packing is not None and not rows.packing.was_read:
        raise RuntimeError(
            f"{type(model).__name__} does not give its attention the ends of samples: set trainer.packing to false"
        )


def _note_read(
    packing: Packing, module: nn.Module, attention_mask: Tensor | None, settings: dict[str, Any]
) -> None:
    """Raises RuntimeError for a model whose attention is more than causal: ``packing_obstacle`` should know it."""
    packing.was_read = True
    needs = [name for name in ("sliding_window", "position_bias", "s_aux") if settings.get(name) is not None]
    if attention_mask is not None:
        needs.append("a mask")
    if needs:
        raise RuntimeError(
            f"{type(module).__name__} can't attend to samples end to end ({', '.join(needs)}): set "
            "trainer.packing to false"
        )


# ----------------------------------------------------------------------- variable lengths


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **settings: Any,
) -> Attention:
    """The same as ``grouped_attention``, without padding."""
    if packing is None:
        return grouped_attention(module, query, key, value, attention_mask, packing, **settings)
    return _attend_varlen(module, query, key, value, attention_mask, packing, settings)


@_keep_eager
def _attend_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing,
    settings: dict[str, Any],
) -> Attention:
    # Rows that are as long are one batch, which torch may have a faster kernel for.
    if _is_one_batch(packing) or query.shape[-1] != value.shape[-1]:
        return grouped_attention(module, query, key, value, attention_mask, packing, **settings)
    _note_read(packing, module, attention_mask, settings)
    # Autocast does not know the kernel.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    return _unviewed(varlen(q, k, v, packing, settings.get("scaling")).unsqueeze(0)), None


def _is_one_batch(packing: Packing) -> bool:
    return len(packing.groups) == 1 and packing.groups[0].cells is None


def varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """Causal attention within rows by torch's flash attention: ``[T, heads, head_dim]``, in half precision."""
    from torch.nn.attention.varlen import varlen_attn  # since 2.10

    attend: Callable[..., Any] = varlen_attn
    # The arguments differ: 2.10 has `is_causal` and no `scale`, later ones a window; grouped heads need to be named
    # since 2.12.
    names = signature(attend).parameters
    settings: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        settings["enable_gqa"] = query.shape[1] != key.shape[1]
    if "scale" in names:
        settings["scale"] = scaling
    elif scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * math.sqrt(query.shape[-1]))
    ends, longest = packing.ends, packing.longest
    output: Tensor = attend(query, key, value, ends, ends, longest, longest, **settings)
    return output


@cache
def varlen_obstacle(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int
) -> str | None:
    """The reason why ``varlen`` can't be used for such heads; None if output and gradient of small rows are right."""
    rows = pack_rows([((1,) * 5, (1,) * 4), ((1,), (1, 1, 1)), ((1,), (1,))], 2)
    packing = rows.with_tensors(lambda tensor: tensor.to(device)).packing
    assert packing is not None
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, count, size) for count in (heads, key_heads, key_heads, heads)]
    *inputs, weights = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)

    def compute(attend: Callable[..., Tensor], *, exact: bool) -> list[Tensor]:
        leaves = [tensor.float() if exact else tensor for tensor in inputs]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            output = attend(*leaves)
            gradients = torch.autograd.grad((output * weights.to(output.dtype)).sum(), leaves)
        return [output.detach(), *gradients]

    def attend_grouped(*leaves: Tensor) -> Tensor:
        module = nn.Module()
        module.num_key_value_groups = heads // key_heads  # type: ignore[assignment]  # transformers reads it
        query, key, value = (leaf.transpose(0, 1).unsqueeze(0) for leaf in leaves)
        return grouped_attention(module, query, key, value, None, packing)[0][0]

    try:
        pairs = zip(
            compute(lambda query, key, value: varlen(query, key, value, packing, None), exact=False),
            compute(attend_grouped, exact=True),
            strict=True,
        )
        errors = [float((actual.float() - expected).norm() / expected.norm()) for actual, expected in pairs]
    except (ImportError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    worst = max(errors)
    return None if worst <= _TOLERANCE else f"its error on a probe is {worst:.2g}"


AttentionInterface.register(GROUPED, grouped_attention)
AttentionInterface.register(VARLEN, varlen_attention)
