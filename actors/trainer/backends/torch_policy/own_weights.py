"""The weights of a model that are trained and saved: all of them, or those of its LoRA adapter. Needs no peft."""

from typing import Final

from torch import Tensor, nn

from .completion_model import named_weights
from .gang_rank import local

ADAPTER_NAME: Final = "default"
"""The name of the only adapter of a model, which is in the names of its parameters."""


def is_adapter(name: str) -> bool:
    """True for a parameter of an adapter, by its name in the model."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name in the base of a parameter that is not an adapter's, by its name beside an adapter."""
    return name.replace(".base_layer.", ".")


def file_name(name: str) -> str:
    """The name of a parameter in files: the same, but for an adapter's, which has the name that peft gives it."""
    if not is_adapter(name):
        return name
    return f"base_model.model.{name.replace(f'.{ADAPTER_NAME}.', '.')}"


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """The live weights by name, tied ones once, without those of a frozen base."""
    weights = named_weights(model)
    return {name: tensor for name, tensor in weights.items() if is_adapter(name)} or weights


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """The live weights but for a frozen base, by their names in files; in a gang this rank's parts of them."""
    return {file_name(name): local(tensor) for name, tensor in own_weights(model).items()}
