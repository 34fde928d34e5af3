"""The layers of a model that a LoRA adapter is for. Needs no peft."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ....messages import LoraConfig


def target_names(base: nn.Module, lora: LoraConfig) -> list[str]:
    """The targets as ends of module names, sorted. ``all-linear``: every linear layer but the output layer.

    Raises ``ValueError`` for a target that is not the name of such a layer.
    """
    layers = list(_linear_layers(base))
    layer_names = sorted({name.rpartition(".")[2] for name in layers})
    if lora.targets == "all-linear":
        return layer_names
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            raise ValueError(
                f"the model has no linear layer {target!r}; it has: {', '.join(layer_names) or 'none'}"
            )
    return sorted(lora.targets)


def _linear_layers(base: nn.Module) -> Iterator[str]:
    model: Any = base
    output = model.get_output_embeddings()
    for name, module in model.named_modules():
        # Conv1D is the linear layer of GPT-2 and its kin.
        if module is not output and isinstance(module, nn.Linear | Conv1D):
            yield name
