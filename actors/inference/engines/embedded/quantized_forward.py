"""The fused forward with linear layers in eight bits, for explorations on CPUs.

A weight is rounded to one of 255 steps of its row's largest, once for each version; an input is rounded when it is
multiplied, by the largest of the batch (dynamic quantisation, Jacob et al., arXiv 1712.05877, eq. 1 and 5). The
embedding, the norms, the attention and the head stay as they are: the head decides the order of the tokens. The weights
in full precision stay in memory beside those in eight bits: the next version is loaded into them.
"""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....errors import UnsupportedModel
from .llama_forward import FusedLlamaForward, Linear, unsupported_reason

_STEPS = 127
"""Steps of a weight to either side of zero, which stays zero."""


class QuantizedLinear:
    """Stands for ``linear`` where ``FusedLlamaForward`` calls it, with its weights as they were at the last
    ``take_weights``."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._packed: Any = None
        self.take_weights()

    def take_weights(self) -> None:
        """Quantises the weights that the layer has now, each row of outputs by its largest."""
        weight = self._linear.matrix.t().contiguous()
        largest = weight.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny)
        zero = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            # PyTorch 2.13 announces the end of these tensors. Its other products in eight bits were slower than the
            # full one on CPUs.
            warnings.filterwarnings("ignore", "torch.quantize_per", UserWarning)
            rounded = torch.quantize_per_channel(weight, (largest / _STEPS).double(), zero, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(rounded, self._linear.bias)

    def __call__(self, x: Tensor) -> Tensor:
        # Inputs in seven bits: sums of two products of eight bits overflow on processors without VNNI.
        product: Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, True)  # C++ has no names
        return product

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += self(x)``."""
        residual.add_(self(x))


class QuantizedForward(FusedLlamaForward):
    """Raises UnsupportedModel for a model that ``FusedLlamaForward`` does not support, or that is not in float32."""

    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        reason = unsupported_reason(model)
        if reason is None and (model.dtype != torch.float32 or model.device.type != "cpu"):
            reason = f"it is in {model.dtype} on {model.device}, and only float32 on a CPU is quantised"
        if reason is not None:
            raise UnsupportedModel(type(model).__name__, f"engine.quantization can't be had: {reason}")
        super().__init__(model, max_context)
        self._quantized: list[QuantizedLinear] = []
        self._layers = [
            replace(
                layer,
                qkv=self._quantize(layer.qkv),
                out=self._quantize(layer.out),
                gate_up=self._quantize(layer.gate_up),
                down=self._quantize(layer.down),
            )
            for layer in self._layers
        ]

    def _quantize(self, linear: Any) -> Any:
        self._quantized.append(QuantizedLinear(linear))
        return self._quantized[-1]

    def weights_loaded(self) -> None:
        for linear in self._quantized:
            linear.take_weights()
