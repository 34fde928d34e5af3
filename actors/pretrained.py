"""Hugging Face models as a ``ModelConfig`` names them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..transport.state_dict import without_ties
from .messages import ModelConfig
from .model_sources import architecture_of

_AUTO_MODEL: Any = AutoModelForCausalLM  # half of its methods have no types


def load_model(model: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model with its weights in ``dtype``, on the CPU, in evaluation mode.

    Weights of a ``path`` are read from there; those of a model made from ``config`` are drawn from torch's global
    generator. Raises OSError if ``path`` can't be loaded, UnsupportedModel as ``empty_model``.
    """
    architecture = architecture_of(model)
    if model.path is not None:
        loaded = _AUTO_MODEL.from_pretrained(
            model.path, config=architecture, dtype=dtype, attn_implementation="sdpa"
        )
    else:
        loaded = _from_config(architecture, dtype)
    evaluating: PreTrainedModel = loaded.train(False)
    return evaluating


def seeded_model(model: ModelConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """``load_model`` with random weights that ``seed`` decides; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random_stream(seed))
        return load_model(model, dtype)


def random_stream(seed: int) -> Tensor:
    """The state (uint8) of torch's CPU generator just seeded; touches neither the global one nor a GPU."""
    return torch.Generator().manual_seed(seed).get_state()


def empty_model(model: ModelConfig) -> PreTrainedModel:
    """The architecture alone, in ``model.dtype`` on ``model.device``, in evaluation mode and without gradients.

    Its weights are loaded later: only the config of a ``path`` is read. Parameters with random initial values are zero,
    and torch's global generator is not used. Raises OSError if ``path`` can't be loaded, UnsupportedModel if its
    attention is one that ``sdpa`` does not compute.
    """
    with _ZeroInitialised():
        network = _from_config(architecture_of(model), getattr(torch, model.dtype))
    placed: PreTrainedModel = network.train(False).requires_grad_(False).to(model.device)
    return placed


def unset_model(model: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture in evaluation mode, for weights in ``dtype`` that are loaded later: parameters are on the device
    ``meta``, buffers are on the CPU with their values. Otherwise as ``empty_model``, with gradients.
    """
    with _Unset():
        network: PreTrainedModel = _from_config(architecture_of(model), dtype).train(False)
    return without_parameters(network)


def without_parameters(model: PreTrainedModel) -> PreTrainedModel:
    """Gives back the model, all of its parameters now on the device ``meta``: tied ones stay tied."""
    outlines: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            outline = outlines.get(id(parameter))
            if outline is None:
                outline = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                outlines[id(parameter)] = outline
            setattr(module, name, outline)
    return model


def named_weights_of(model: ModelConfig) -> dict[str, Tensor]:
    """The weights of a policy's model by name, tied ones once: float32 on the device ``meta``, which has shapes and no
    memory. Only the config of a ``path`` is read. Raises as ``empty_model``."""
    network = outline_of(model, torch.float32)
    return {
        name: tensor.detach() for name, tensor in without_ties(network.state_dict(keep_vars=True)).items()
    }


def outline_of(
    model: ModelConfig, dtype: torch.dtype | None = None, *, local_files_only: bool = False
) -> PreTrainedModel:
    """The architecture on the device ``meta``, which has shapes and no memory, in ``dtype`` or ``model.dtype``.

    Raises as ``empty_model``.
    """
    architecture = architecture_of(model, local_files_only=local_files_only)
    with torch.device("meta"):
        network: PreTrainedModel = _from_config(architecture, dtype or getattr(torch, model.dtype))
    return network


def _from_config(architecture: PreTrainedConfig, dtype: torch.dtype) -> Any:
    return _AUTO_MODEL.from_config(architecture, dtype=dtype, attn_implementation="sdpa")


def leave_out_cudnn() -> None:
    """From now on attention by ``sdpa`` is not computed by cuDNN in this process.

    On GPUs from Hopper on torch prefers it in half precision. For each new shape it builds a plan, and another one for
    the backward: on an H200 (torch 2.11) it took 3.1 of the 4.8 s of 238 decode steps, where float32 took 0.4 s. Shapes
    of decode steps change every few tokens, and those of micro-batches from one to the next. The other kernels need no
    plans.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


class _Unset(TorchFunctionMode):
    """Memory without contents is on the device ``meta``; fills with nothing instead of random numbers.

    It holds for this thread only: a trainer that initialises its model in another thread is not affected.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ in _RANDOM:
            return args[0] if args else kwargs["tensor"]
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class _ZeroInitialised(TorchFunctionMode):
    """Fills with zeros instead of random numbers. Holds for this thread only, too."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ in _RANDOM:
            tensor: Tensor = args[0] if args else (kwargs or {})["tensor"]
            with torch.no_grad():
                return tensor.zero_()
        return func(*args, **(kwargs or {}))


_RANDOM: Final = frozenset(
    {"normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_"}
)
