"""The modules of a Hugging Face model: its repeated layers, which recompute or are gathered one at a time, and modules
that others take the place of."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of every transformers model inside ``model``, inner ones first; empty if it does not name them."""
    names = {
        name
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for name in module._no_split_modules or ()
    }
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]


def recompute_layers(model: nn.Module) -> None:
    """Keeps no activation inside a layer for the backward, which computes them again (Chen et al., arXiv
    1604.06174). Raises ``ValueError`` for a model without named layers."""
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not name its layers: activation_checkpointing needs them"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Puts ``replacement(module)`` in the place of each module inside ``model``; None keeps the module."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = replacement(child)
            if new is not None:
                setattr(parent, name, new)
