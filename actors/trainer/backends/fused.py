"""RMSNorm and rotary embedding in few passes over memory, put into one Hugging Face model in place of its own.

As models write them, an RMSNorm is about six elementwise operations and a rotation of the queries and keys
ten, and autograd makes about twice as many of their backward: a quarter of a small model's training on a CPU.
Here each is one autograd function with its gradient written out. A second derivative is refused.

`fuse` changes one model, never a class or a module of transformers. It takes nothing on trust: what is
recognised by name is replaced only where it computes the same on a probe.
"""

from collections.abc import Callable
from inspect import signature
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

Model = TypeVar("Model", bound=nn.Module)
Rotate = Callable[..., tuple[Tensor, Tensor]]

_ROTATE = "apply_rotary_pos_emb"  # what transformers calls it in every model's file


def fuse(model: Model) -> Model:
    """Replaces what it can in ``model``, on the CPU, and returns it: names and values of its state stay.

    An RMSNorm is replaced where its class is called one, ``weight`` is all its state and it computes
    ``weight * x / sqrt(mean(x ** 2) + eps)`` in float32 with the result types of transformers' Llama: others
    (Gemma's ``1 + weight``, say) are left alone. An attention gets the faster rotation where its ``forward``
    calls the global function ``apply_rotary_pos_emb`` and that rotates halves as Llama's does.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            norm = _fused_norm(child)
            if norm is not None:
                setattr(parent, name, norm)
        forward = _fused_attention_forward(parent)
        if forward is not None:
            parent.forward = MethodType(forward, parent)
    return model


# --------------------------------------------------------------------------- RMSNorm


class RMSNormFunction(torch.autograd.Function):
    """``weight * x / rms(x)`` over the last dimension (Zhang & Sennrich, arXiv 1910.07467) and its gradient.

    ``x``: ``[..., H]``, computed with in float32 at least; ``weight``: ``[H]``; ``eps`` is added to the mean
    square. The normed ``n = x / rms(x)`` is rounded to ``x``'s type before ``weight`` multiplies it, as
    transformers does, so the result is ``[..., H]`` of the type both promote to.

    With ``g`` the gradient of the result, ``dweight = sum(g n)`` over the rows and
    ``dx = (g weight - n mean(g weight n)) / rms(x)``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # The operations of transformers' own forward, so that the result has the same bits.
        scale = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = wide * scale
        ctx.save_for_backward(normed, scale, weight)
        ctx.dtype = x.dtype
        result: Tensor = weight * normed.to(x.dtype)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        size = normed.shape[-1]
        gradient = gradient.to(normed.dtype).contiguous()  # mixed strides cost more than this copy
        product = gradient * normed
        dweight = product.reshape(-1, size).sum(0).to(weight.dtype)
        total = product.mul_(weight).sum(-1, keepdim=True)
        dx = (gradient * weight).addcmul_(normed, total, value=-1 / size).mul_(scale)
        return dx.to(ctx.dtype), dweight, None


rms_norm: Callable[[Tensor, Tensor, float], Tensor] = RMSNormFunction.apply


class FusedRMSNorm(nn.Module):
    """RMSNorm of ``[..., H]`` with another module's ``weight`` ``[H]``, under the same name in the state dict."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def _fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """What may stand in for ``module``; None where nothing may."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    weight = module.state_dict(keep_vars=True).get("weight")
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or len(module.state_dict()) != 1:
        return None
    if module._forward_hooks or module._forward_pre_hooks or len(signature(module.forward).parameters) != 1:
        return None
    fused = FusedRMSNorm(weight, eps)
    # The second row's mean square is about as small as eps usually is, so that eps shows.
    rows = _probe(3, weight.shape[0]) * torch.tensor([[1.0], [1e-3], [1e2]])
    own = {"weight": _probe(weight.shape[0]).to(weight.dtype)}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-6)):
        with torch.no_grad():
            expected = functional_call(module, own, rows.to(dtype))
            found = functional_call(fused, own, rows.to(dtype))
        if not _same(found, expected, tolerance):
            return None
    return fused


# --------------------------------------------------------------------------- rotary embedding


class RotaryFunction(torch.autograd.Function):
    """Rotary position embedding (Su et al., arXiv 2104.09864) of queries and keys, pairing the two halves.

    ``q``: ``[B, H, T, D]``, ``k``: ``[B, K, T, D]``, ``cos`` and ``sin``: ``[1 or B, T, D]``, all of one type;
    returns ``q`` and ``k`` rotated: ``x cos + (-x2, x1) sin`` where ``x = (x1, x2)``. No gradient flows to
    ``cos`` and ``sin``.

    Works on ``[B, T, H, D]``, which is how the projections and torch's attention lay memory out, with tables
    repeated for each head: every operation is then one contiguous run.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        tables = [_per_head(table, x.shape[1]) for x in (q, k) for table in (cos, signed)]
        ctx.save_for_backward(*tables)
        return _rotate(q, *tables[:2]), _rotate(k, *tables[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        tables = ctx.saved_tensors
        return _rotate_back(dq, *tables[:2]), _rotate_back(dk, *tables[2:]), None, None


rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = RotaryFunction.apply


def _per_head(table: Tensor, heads: int) -> Tensor:
    """``[B, T, D]`` to ``[B, T, heads, D]``."""
    return table.unsqueeze(2).expand(-1, -1, heads, -1).contiguous()


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    # No fused multiply-add, so that the result has the bits of transformers' own forward.
    return (x * cos).add_(_swap_halves(x).mul_(signed_sin)).transpose(1, 2)


def _rotate_back(gradient: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    gradient = gradient.transpose(1, 2).contiguous()
    return _swap_halves(gradient * signed_sin).addcmul_(gradient, cos).transpose(1, 2)


def _swap_halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), -1)


def fused_rotation(own: Rotate) -> Rotate:
    """A model's function ``own(q, k, cos, sin, ...)``, faster where it is called as Llama calls it."""

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        plain = not args and not kwargs and q.dim() == k.dim() == 4 and cos.dim() == 3
        # Under autocast types may differ, and partial rotations have a shorter table.
        if plain and q.dtype == k.dtype == cos.dtype and q.shape[-1] == k.shape[-1] == cos.shape[-1]:
            return rotary(q, k, cos, sin)
        return own(q, k, cos, sin, *args, **kwargs)

    return rotate


def _fused_attention_forward(module: nn.Module) -> FunctionType | None:
    """``module``'s own ``forward`` with another rotation; None where it has none, or one of another kind."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _ROTATE not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(_ROTATE)
    if "forward" in vars(module) or not isinstance(own, FunctionType) or not _rotates_halves(own):
        return None
    # The same code, seeing another function under that global name: transformers has no hook for it, and
    # everything else an attention does (caches, windows, dropout) stays the model's.
    names = forward.__globals__ | {_ROTATE: fused_rotation(own)}
    fused = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


def _rotates_halves(own: Rotate) -> bool:
    parameters = list(signature(own).parameters.values())
    if [p.name for p in parameters[:4]] != ["q", "k", "cos", "sin"]:
        return False
    if any(p.default is p.empty for p in parameters[4:]):
        return False
    q, k, (cos, sin) = _probe(2, 2, 3, 8), _probe(2, 1, 3, 8), _probe(2, 2, 3, 8)
    found = rotary(q, k, cos, sin)
    return all(_same(*pair, 1e-5) for pair in zip(found, own(q, k, cos, sin), strict=True))


# --------------------------------------------------------------------------- probes


def _probe(*shape: int) -> Tensor:
    """Always the same float32 numbers, normally distributed; torch's global generator is left as it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _same(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * 1e-2)
