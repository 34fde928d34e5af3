"""Forwards in bfloat16 over float32 weights, as the models' own code computes in bfloat16, and as engines do.

    layers        compute with copies of their parameters, each made when its layer is computed, and again when it is
                  recomputed for the backward; FSDP2 gathers such copies itself
    outside       the same for a forward of the whole model, but for embeddings and the output layer
    embeddings    look up float32 rows and round these: the same bits, and their gradient is summed in float32
    output layer  see ``SummedLinear``

It takes the place of autocast, which leaves norms and the sum of the layers' outputs in float32, where engines round
both: then the probabilities of tokens differ by as much as the rounding of a whole model. And autocast keeps its copies
of all weights to the end of a forward.

Moments, gradients and their sums over samples and ranks stay in float32: the gradient of a copy is added to that of its
parameter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .layers import layers_of

Place = tuple[nn.Module, str]
"""A module, and the name of a parameter that is its own."""


def narrow_layers(model: nn.Module) -> None:
    """From now on each layer that ``model`` names computes in bfloat16. To be called before the layers are
    recomputed, and after they are compiled."""
    for layer in layers_of(model):
        layer.forward = partial(_narrow_forward, places_in(layer.modules()), layer.forward)


def round_embeddings(model: nn.Module) -> None:
    """From now on embeddings outside of the layers give bfloat16."""
    for module in modules_outside(model):
        if type(module) is nn.Embedding:
            module.register_forward_hook(_round)


def modules_outside(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` that are in no layer."""
    inside = {id(module) for layer in layers_of(model) for module in layer.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def places_in(modules: Iterable[nn.Module]) -> list[Place]:
    """Those that ``narrow_parameters`` can take: all but the weights of embeddings as torch has them, which are rounded
    row by row. An embedding of a model's own, as Gemma's, computes with its weight's type."""
    return [
        (module, name)
        for module in modules
        if type(module) is not nn.Embedding
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_floating_point()
    ]


@contextmanager
def narrow_parameters(places: Sequence[Place]) -> Iterator[None]:
    """Within it the parameters at ``places`` are copies in bfloat16, tied ones the same. Their gradients go to the
    parameters."""
    wide = [module._parameters[name] for module, name in places]
    copies = {id(parameter): parameter.to(torch.bfloat16) for parameter in wide if parameter is not None}
    for (module, name), parameter in zip(places, wide, strict=True):
        module._parameters[name] = copies.get(id(parameter))  # type: ignore[assignment]  # attributes come from there
    try:
        yield
    finally:
        for (module, name), parameter in zip(places, wide, strict=True):
            module._parameters[name] = parameter


def _narrow_forward(places: Sequence[Place], forward: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    with narrow_parameters(places):
        return forward(*args, **settings)


def _round(_module: nn.Module, _args: object, rows: Tensor) -> Tensor:
    return rows.to(torch.bfloat16)
