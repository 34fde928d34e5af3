"""Tensors that activation functions keep, as transformers computes them."""

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from flexmarl.actors.model_shape import ACTIVATION_TENSORS

OF_ONE_OPERATION = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@pytest.mark.parametrize("name", [*ACTIVATION_TENSORS, *OF_ONE_OPERATION])
def test_an_activation_function_keeps_so_many_tensors_beside_input_and_result(name: str) -> None:
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs = torch.randn(4, 8) * torch.ones(1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = ACT2FN[name](inputs)
    others = kept.keys() - {tensor.untyped_storage().data_ptr() for tensor in (inputs, result)}
    assert len(others) == ACTIVATION_TENSORS.get(name, 0)
