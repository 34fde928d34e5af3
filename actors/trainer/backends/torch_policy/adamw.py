"""AdamW over parameters whose gradient is a sum: allocated once, divided and clipped at the step.

In a gang they are a rank's parts: AdamW takes each element by itself, and only the norm is over all parts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from ...trainer_config import OptimizerConfig
from .gang_rank import GangRank, local
from .state_memory import StateMemory

Parameters = dict[str, nn.Parameter]

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of the run's step ``step`` (0-based) of ``total_steps``; a pure function of them.

    In the first ``warmup_steps`` it is ``lr * (step + 1) / (warmup_steps + 1)``, so that the first step is not wasted
    on a rate of 0. Then ``lr``, or for ``linear`` ``lr * (total_steps - step) / (total_steps - warmup_steps)``, and 0
    from ``total_steps`` on.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    return config.lr * max(0, total_steps - step) / max(1, total_steps - config.warmup_steps)


def trained_parameters(
    model: nn.Module, memory: StateMemory, kind: str, name_of: Callable[[str], str] = str
) -> Parameters:
    """The parameters that are not frozen, by ``name_of`` their names in the model; in a gang the parts that are on this
    rank. With gradients, allocated now and for ever.

    The gradients are those of ``memory``, ``{kind}/{name}``, as far as it has them.
    """
    parameters: Parameters = {}
    for name_in_model, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = name_of(name_in_model)
        if isinstance(parameter, DTensor):
            parameters[name] = nn.Parameter(local(parameter))
            gradient = memory.take(f"{kind}/{name}", parameters[name])
            parameter.grad = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            parameters[name].grad = local(parameter.grad)
        else:
            parameters[name] = parameter
            parameter.grad = memory.take(f"{kind}/{name}", parameter.detach())
    return parameters


def make_adamw(
    parameters: Parameters, config: OptimizerConfig, memory: StateMemory, kind: str
) -> optim.AdamW:
    """With moments allocated now, once, and never again. All parameters are on one device.

    The moments are those of ``memory``, ``{kind}/{moment}.{parameter's name}``, as far as it has them.

    Norms and biases, all parameters with less than two dimensions, have no weight decay, as in transformers' trainer.
    """
    every = list(parameters.values())
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in every if parameter.dim() > 1], "decays": True},
        {"params": [parameter for parameter in every if parameter.dim() <= 1], "decays": False},
    ]
    optimizer = optim.AdamW(groups, lr=config.lr, fused=every[0].device.type in ("cpu", "cuda"))
    configure(optimizer, config)
    for name, parameter in parameters.items():
        likes = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": parameter.detach(),
            "exp_avg_sq": parameter.detach(),
        }
        optimizer.state[parameter] = {
            moment: memory.take(f"{kind}/{moment}.{name}", like) for moment, like in likes.items()
        }
    return optimizer


def configure(optimizer: optim.AdamW, config: OptimizerConfig) -> None:
    """Sets all settings but the learning rate, which every step is given."""
    for group in optimizer.param_groups:
        decay = config.weight_decay if group["decays"] else 0.0
        group.update(betas=config.betas, eps=config.eps, weight_decay=decay)


def gradient_norm(parameters: Parameters, divisor: int, gang: GangRank) -> float:
    """The norm of the accumulated gradient divided by ``divisor``, over all parts of it."""
    norm = nn.utils.get_total_norm(gradients(parameters).values())
    if gang.size > 1:
        norm = gang.sum_of_parts(norm.double().square()).sqrt()
    return float(norm) / divisor


def apply_gradient(
    parameters: Parameters, optimizer: optim.AdamW, *, divisor: int, norm: float, max_norm: float, lr: float
) -> None:
    """Divides the accumulated gradient by ``divisor``, clips it from ``norm`` to ``max_norm``, steps and zeroes it."""
    # Dividing and clipping are one factor, so one pass over the gradient.
    clip = min(1.0, max_norm / (norm + _CLIP_EPSILON))
    # Not AdamW's own ``grad_scale``: it divides, so that the last bit of a step would depend on it.
    torch._foreach_mul_(list(gradients(parameters).values()), clip / divisor)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def drop_gradient(optimizer: optim.AdamW) -> None:
    """Zeroes the gradient; weights, moments and step counters stay."""
    optimizer.zero_grad(set_to_none=False)


def forget_moments(optimizer: optim.AdamW) -> None:
    """Zeroes moments and step counters, as a new AdamW has them, without a second copy in memory."""
    for state in optimizer.state.values():
        for moment in state.values():
            moment.zero_()


def moments(parameters: Parameters, optimizer: optim.AdamW) -> dict[str, Tensor]:
    """The live moments and step counters, as ``{moment}.{parameter's name}``."""
    return {
        f"{moment}.{name}": tensor
        for name, parameter in parameters.items()
        for moment, tensor in optimizer.state[parameter].items()
    }


def gradients(parameters: Parameters) -> dict[str, Tensor]:
    """The live gradients by the parameter's name."""
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
