"""Compilation by torch (Inductor, Triton): on a GPU many small operations become few kernels.

It compiles a layer's forward, and the log-probabilities of logits: more than half of a step's time were reads and
writes of tensors between products. A step of a policy of 0.5B on an H200 became 1.7 times as fast, in three
quarters of the memory. It is compiled once for all lengths. On a CPU it is not worth its seconds.
"""

import functools
import subprocess
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn

from .....core.telemetry import get_logger
from ....truncated_scores import Truncations
from ...objective.loss import token_logprobs
from ...rank_bytes import wants_compilation
from .layers import layers_of

log = get_logger(__name__)

_MOST_VARIANTS: Final = 64
"""Variants of one function: of dtype, with and without gradient, for each shape of a model in this process. Torch's
limit of 8 is for programs of one model; beyond it the function would run as it is written, with no word about it."""

Function = TypeVar("Function", bound=Callable[..., Any])


def is_compiled(
    setting: bool | None, model: nn.Module, device: torch.device, *, replays_routes: bool = False
) -> bool:
    """True for a ``model`` of a GPU, if ``wants_compilation`` says so and a small function can be compiled there."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return wants_compilation(setting, parameters, replays_routes=replays_routes) and can_compile(device)


@functools.cache
def can_compile(device: torch.device) -> bool:
    """True on a GPU with a C compiler and Python's headers beside it, which Triton needs. Without them a warning names
    the reason, once."""
    if device.type != "cuda":
        return False
    try:
        compile_function(_probe)(torch.zeros(2, device=device))
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        log.warning(
            "torch.compile does not work here: the policies are trained without it, slower. Triton needs a C compiler "
            "and Python's headers",
            error=str(error).strip().partition("\n")[0],
        )
        return False
    return True


def _probe(tensor: Tensor) -> Tensor:
    return torch.sin(tensor) + 1


def compile_function(function: Function) -> Function:
    """``function`` compiled at its first call, for all sizes at once: micro-batches differ in length."""
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, _MOST_VARIANTS)
    return cast(Function, torch.compile(function, dynamic=True))


def compile_layers(model: nn.Module) -> None:
    """Compiles the forward of each layer that ``model`` names. Hooks, and a checkpoint around it, stay outside."""
    for layer in layers_of(model):
        layer.forward = compile_function(layer.forward)


def compiled_token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0, truncations: Truncations | None = None
) -> Tensor:
    """``token_logprobs`` in one pass over the logits, and one in the backward. Those of truncations are not compiled:
    how they rank depends on the scores."""
    if truncations is not None:
        return token_logprobs(logits, tokens, temperature, truncations)
    if not isinstance(temperature, Tensor) and temperature != 1.0:
        # A number would be a constant of the compiled function.
        temperature = torch.full((len(tokens),), temperature, device=logits.device)
    # A part of a tensor is a view, and a view is a variant of its own; a detached part counts as a whole tensor.
    whole = temperature.detach() if isinstance(temperature, Tensor) else temperature
    return _compile_token_logprobs()(logits, tokens.detach(), whole)


@functools.cache
def _compile_token_logprobs() -> Callable[[Tensor, Tensor, float | Tensor], Tensor]:
    return compile_function(token_logprobs)
