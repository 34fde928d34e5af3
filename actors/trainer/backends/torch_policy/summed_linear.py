"""A linear layer in bfloat16, computed for one chunk of tokens after the other: its gradient is summed in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_PART_ELEMENTS = {"cpu": 4 << 20, "cuda": 128 << 20}
"""Elements of a product that is made in bfloat16 and then added to the gradient. On a CPU torch makes a float32 copy of
it for that, which should stay in the cache; a GPU is faster with one large product."""
_ALIGNED_COLUMNS = 64
"""A part begins at a multiple of it: else a GPU's loads of 16 bytes would not be aligned, and a product several times
slower."""


class SummedLinear:
    """``x W^T + b`` with bfloat16 copies of a layer's parameters, one for all chunks.

    Autograd adds up the gradients of a tensor in the tensor's type: the sum over the chunks would be rounded to 8 bits
    as often as there are chunks. With 120 of them it was about 1 % off. Here the backward of a chunk adds its part to
    the float32 gradient of the layer itself, where it must go in the end. A cast of ``W`` for each chunk would do it,
    too, and would read and write all of ``W`` each time.

    So the gradient is the only float32 buffer: 4 bytes times vocabulary times hidden size on a GPU, which a policy
    needs anyway, and 2 for the copy. A sum beside it would take 4 more. In return only ``backward`` gives this
    gradient, ``torch.autograd.grad`` does not.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._weight = layer.weight.detach().to(torch.bfloat16)
        self._bias = None if layer.bias is None else layer.bias.detach().to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[..., in]``; returns ``[..., out]`` in bfloat16."""
        layer = self._layer
        if not (torch.is_grad_enabled() and layer.weight.requires_grad):
            return nn.functional.linear(x.to(torch.bfloat16), self._weight, self._bias)
        return _product(x.to(torch.bfloat16), self._weight, self._bias, layer.weight, layer.bias)


class _Product(torch.autograd.Function):
    """``x W^T + b`` with ``W`` and ``b`` in bfloat16. Its backward adds to ``.grad`` of ``parameter`` and
    ``bias_parameter``, their float32 originals, and gives autograd no gradient of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameter: nn.Parameter,
        bias_parameter: nn.Parameter | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters = parameter, bias_parameter
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        parameter, bias = ctx.parameters
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[3]:
            columns_per_part = _columns_per_part(parameter)
            parts = torch.split(_gradient(parameter), columns_per_part)
            for part, columns in zip(parts, torch.split(rows, columns_per_part, dim=1), strict=True):
                part.add_(columns.t() @ inputs)
        if ctx.needs_input_grad[4]:
            _gradient(bias).add_(rows.sum(0, dtype=torch.float32))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


def _columns_per_part(parameter: Tensor) -> int:
    columns = _PART_ELEMENTS[parameter.device.type] // parameter.shape[1]
    return max(_ALIGNED_COLUMNS, columns - columns % _ALIGNED_COLUMNS)


_product: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor] = _Product.apply


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
