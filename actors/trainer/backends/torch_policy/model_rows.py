"""The modules of a Hugging Face model without memory for its weights, and the rows of the weights that a rank has.

    outline   modules with parameters on the device ``meta`` and real buffers, and functions that give the rows
    fill      after the modules were changed and divided: the parameters get memory on their device, with the rows

Rows are drawn as ``seeded_model`` draws them, or read from safetensors, those of experts too that the files have one by
one. A checkpoint that transformers has to convert in another way, and files of pickled tensors, are loaded whole on the
host of each rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....messages import ModelConfig
from ....pretrained import seeded_model, unset_model, without_parameters
from .drawn_rows import DrawnAgain, drawn_model
from .gang_rank import GangRank, divided_like, local
from .saved_rows import saved_rows

Rows = dict[str, Callable[[], Tensor]]
"""A rank's rows of weights by their names in the model. Each is called once, and what it gives is the caller's."""


def outline(config: ModelConfig, seed: int | None, dtype: torch.dtype, gang: GangRank) -> tuple[Any, Rows]:
    """A causal language model in evaluation mode, and this rank's rows of its weights in ``dtype``: those of
    ``seeded_model``, bit for bit. None for ``seed``: no rows. Torch's global generator is left as it was. Raises as
    ``load_model``."""
    if seed is None:
        return unset_model(config, dtype), {}
    if config.path is not None:
        network = unset_model(config, dtype)
        rows = saved_rows(network, config.path, gang.rows)
        return _outline_of_whole(config, seed, dtype, gang) if rows is None else (network, rows)
    try:
        network, drawn = drawn_model(
            config, seed, dtype, lambda whole: own_rows(whole, gang).to(config.device)
        )
    except DrawnAgain:
        return _outline_of_whole(config, seed, dtype, gang)
    return network, {name: partial(_same, rows) for name, rows in drawn.items()}


def _outline_of_whole(config: ModelConfig, seed: int, dtype: torch.dtype, gang: GangRank) -> tuple[Any, Rows]:
    network = seeded_model(config, seed, dtype)
    rows: Rows = {
        name: partial(_same, own_rows(parameter.detach(), gang))
        for name, parameter in network.named_parameters()
    }
    return without_parameters(network), rows


def _same(rows: Tensor) -> Tensor:
    return rows


def own_rows(tensor: Tensor, gang: GangRank) -> Tensor:
    """This rank's rows of a whole tensor: a copy if they are a part."""
    part = gang.rows(tensor.shape)
    return tensor if part.is_whole else tensor[part.start : part.stop].clone()


def fill(root: nn.Module, model: nn.Module, rows: Rows, device: torch.device) -> None:
    """Gives the parameters of ``root`` that are on ``meta`` memory on ``device``, and moves all buffers there. Tied
    weights stay tied. ``model``: all of ``root`` that has parameters.

    Those whose names in ``model`` are in ``rows`` have these values, and are taken out of it; the others are not set.
    """
    named = dict(model.named_parameters())  # kept to the end: an id may be used again
    names = {id(parameter): name for name, parameter in named.items()}

    def make(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        part = local(tensor)
        give = rows.pop(names.get(id(tensor), ""), None)
        memory = torch.empty_like(part, device=device) if give is None else give().to(device, part.dtype)
        return divided_like(tensor, memory)

    if any(isinstance(parameter, DTensor) and parameter.is_meta for parameter in named.values()):
        modules: Any = root  # its method has no types
        modules._apply(make)  # FSDP2 pads the new parts there, and its parameters stay the same objects
        return
    parameters: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = nn.Parameter(make(parameter), parameter.requires_grad)
                setattr(module, name, parameters[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, buffer.to(device))
