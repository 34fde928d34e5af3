"""RMSNorm in few passes over memory, put into one Hugging Face model in place of its own.

As models write it, an RMSNorm is about six elementwise operations, and autograd makes about twice as many of
their backward. Here it is one autograd function with its gradient written out; a second derivative is refused. On a GPU
it is torch's kernel.

``fuse_norms`` changes one model, never a class or a module of transformers. A norm that is recognised by its name is
replaced only if it computes the same on a probe.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from .layers import replace_modules

Model = TypeVar("Model", bound=nn.Module)


def fuse_norms(model: Model) -> Model:
    """Replaces the norms in ``model``, on the CPU, and returns the model: names and values of its state stay.

    A module is replaced if its class is named RMSNorm, ``weight`` is all its state and it computes
    ``weight * x / sqrt(mean(x ** 2) + eps)`` in float32 with the result types of transformers' Llama: others
    (Gemma's ``1 + weight``, say) are left alone.
    """
    replace_modules(model, _fused_norm)
    return model


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
        """Returns the normed rows times ``weight``. Keeps ``n`` and ``1 / rms(x)``, so that the backward needs no
        second pass; of a narrower ``x`` it keeps ``x`` itself, which has half of the bytes."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # The operations of transformers' own forward, so that the result has the same bits.
        scale = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = wide * scale
        ctx.save_for_backward(normed if x.dtype == normed.dtype else x, scale, weight)
        ctx.dtype = x.dtype
        result: Tensor = weight * normed.to(x.dtype)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Returns ``dx`` in the type of ``x``, ``dweight`` in that of ``weight``, and None for ``eps``."""
        kept, scale, weight = ctx.saved_tensors
        normed = kept if kept.dtype == scale.dtype else kept.to(scale.dtype) * scale
        size = normed.shape[-1]
        gradient = gradient.to(normed.dtype).contiguous()  # mixed strides cost more than this copy
        product = gradient * normed
        dweight = product.reshape(-1, size).sum(0).to(weight.dtype)
        total = product.mul_(weight).sum(-1, keepdim=True)
        dx = (gradient * weight).addcmul_(normed, total, value=-1 / size).mul_(scale)
        return dx.to(ctx.dtype), dweight, None


rms_norm: Callable[[Tensor, Tensor, float], Tensor] = RMSNormFunction.apply


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same by torch: one kernel of a GPU for each of forward and backward, and many operations on a CPU.

    ``x`` and ``weight`` are of one type. ``n`` is not rounded before ``weight`` multiplies it: in bfloat16 the result
    may differ by one rounding.
    """
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


class FusedRMSNorm(nn.Module):
    """RMSNorm of ``[..., H]`` with another module's ``weight`` ``[H]``, under the same name in the state dict."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., H]``. The parameter has the name that transformers' norms give it."""
        # Of two types the result has a rounding between them, which torch leaves out.
        if hidden_states.is_cuda and hidden_states.dtype == self.weight.dtype:
            return torch_rms_norm(hidden_states, self.weight, self.eps)
        return rms_norm(hidden_states, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Size and eps, as transformers' norms show them in a printed model."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def _fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """A replacement of ``module``; None if this module has no fused form."""
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
    parameters = {"weight": _probe(weight.shape[0]).to(weight.dtype)}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-6)):
        with torch.no_grad():
            expected = functional_call(module, parameters, rows.to(dtype))
            actual = functional_call(fused, parameters, rows.to(dtype))
        if not _same(actual, expected, tolerance):
            return None
    return fused


def _probe(*shape: int) -> Tensor:
    """Always the same float32 numbers, normally distributed; torch's global generator is left as it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _same(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * 1e-2)
