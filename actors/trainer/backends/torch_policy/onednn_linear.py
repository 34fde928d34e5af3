"""Linear layers by oneDNN's matrix product, put into one Hugging Face model in place of its own.

torch computes float32 products on CPUs by MKL, which seems to use AVX-512 on Intel's processors alone: on an AMD EPYC
that has it, MKL reached 103 GFLOP/s and oneDNN 215, with one thread. Both are in torch.

``use_onednn`` changes one model, never a class or a module of torch. The operation is the one that torch's compiler
calls, and not part of torch's documented interface: it is used only if it computes the right product on a probe.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .layers import replace_modules

Model = TypeVar("Model", bound=nn.Module)


def use_onednn(model: Model) -> Model:
    """Replaces the linear layers of ``model``, to be computed with in float32 on the CPU, and returns the model: names
    and values of its state stay. Leaves it as it is on a processor without AVX-512.

    A layer is replaced if its class is ``nn.Linear`` itself, without hooks.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_right():
        replace_modules(model, _onednn_linear)
    return model


def _onednn_linear(module: nn.Module) -> "OneDnnLinear | None":
    hooks = module._forward_hooks or module._forward_pre_hooks
    return OneDnnLinear(module) if type(module) is nn.Linear and not hooks else None


class OneDnnLinear(nn.Linear):
    """``x W^T + b`` with the parameters of another layer, under the same names in the state dict. Types other than
    float32 are computed as there."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make parameters
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # its name in torch
        """``[..., in]`` to ``[..., out]``, in the type of ``input``."""
        if input.dtype != torch.float32 or self.weight.dtype != torch.float32 or not input.numel():
            return super().forward(input)  # oneDNN has no product of no rows, as an expert may get them
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b``. ``x``: ``[..., in]``, ``weight``: ``[out, in]``, ``bias``: ``[out]`` or None; ``[..., out]``."""
    # The rows are made and given back outside of the function: torch forbids that a model changes a view in place that
    # an autograd function has made, and Llama 4 adds its experts' outputs in place to that of a layer.
    return rows_by_onednn(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


class OneDnnLinearFunction(torch.autograd.Function):
    """``y = x W^T + b`` and its gradient: with ``g`` that of ``y``, ``dx = g W``, ``dW = g^T x`` and ``db`` the sum of
    ``g`` over the rows. ``x``: ``[rows, in]``, ``weight``: ``[out, in]``, ``bias``: ``[out]`` or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns ``y``, ``[rows, out]`` float32."""
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns ``dx``, ``dW`` and ``db`` for ``gradient`` ``[rows, out]``; None for each that autograd does not
        need."""
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = _product(gradient, weight.t())
        if ctx.needs_input_grad[1]:
            # As dW or as its transpose: faster with fewer rows than columns.
            if weight.shape[0] > weight.shape[1]:
                dweight = _product(x.t(), gradient.t()).t()
            else:
                dweight = _product(gradient.t(), x.t())
        if ctx.needs_input_grad[2]:
            dbias = gradient.sum(0)
        return dx, dweight, dbias


rows_by_onednn: Callable[[Tensor, Tensor, Tensor | None], Tensor] = OneDnnLinearFunction.apply


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.t() + bias``; ``x``: [rows, in], ``weight``: [out, in]."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _is_right() -> bool:
    """True if this torch has the operation, and its result is the product."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 3), (7, 3), (7,)))
    try:
        product = _product(x, weight, bias)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(product, nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-6)
