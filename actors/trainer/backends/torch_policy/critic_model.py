"""The critic of a policy: the policy's own body, copied, with one number per token in place of the vocabulary."""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...padding import PaddedRows
from ...saved_policy import CRITIC_FILE
from ...trainer_config import CriticConfig, OptimizerConfig
from .adamw import (
    apply_gradient,
    configure,
    drop_gradient,
    gradient_norm,
    gradients,
    learning_rate,
    make_adamw,
    moments,
    trained_parameters,
)
from .compiled import compile_layers
from .completion_model import CompletionModel, named_weights
from .gang_rank import GangRank, local
from .layers import recompute_layers
from .model_rows import Rows, fill
from .narrow_forward import (
    Place,
    modules_outside,
    narrow_layers,
    narrow_parameters,
    places_in,
    round_embeddings,
)
from .own_weights import own_weights
from .state_memory import StateMemory


class BodyAndHead(nn.Module):
    """``body``: a Hugging Face model without its output layer; ``head``: ``[H]`` to one number."""

    def __init__(self, body: Any, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self._outside: Sequence[Place] = ()

    def narrow(self) -> None:
        """From now on the body computes in bfloat16: see ``narrow_forward``."""
        narrow_layers(self.body)
        round_embeddings(self.body)
        self._outside = places_in(modules_outside(self.body))

    def forward(self, rows: PaddedRows) -> Tensor:
        """The values ``[N, 1]`` before the completion tokens, in the type of the head's weight."""
        with narrow_parameters(self._outside):
            hidden = self.body(**rows.model_inputs).last_hidden_state
        at_completions = hidden.flatten(0, 1).index_select(0, rows.positions)
        values: Tensor = self.head(at_completions.to(self.head.weight.dtype))
        return values


class CriticModel:
    """``model`` is the live module, float32, on the policy's device. Its gradient accumulates as the policy's does."""

    def __init__(
        self,
        policy: CompletionModel,
        critic: CriticConfig,
        optimizer: OptimizerConfig,
        gang: GangRank,
        memory: StateMemory,
        *,
        base: Rows,
        recompute: bool = False,
        compiled: bool = False,
    ) -> None:
        """A body like that of ``policy``, with a head of zeros: all of its first values are 0. The weights are those of
        ``memory``, as far as it has them; others of the body are set by ``start_from``.

        ``optimizer`` is the policy's; ``critic`` has the settings that differ. ``policy`` is not divided yet; this body
        is, over ``gang``. ``base``: the rows of a frozen base by their names in the policy's model. Gradients and
        moments are those of ``memory``, as far as it has them. ``recompute``: the activations of a layer are computed
        again in the backward. ``compiled``: its forward is. Raises ``ValueError`` for a model that transformers does
        not split into body and head.
        """
        body = policy.model.base_model
        if body is policy.model:
            raise ValueError(
                f"{type(policy.model).__name__} has no body to put a critic's head on; take an algorithm without one"
            )
        width = policy.model.get_output_embeddings().weight.shape[1]
        trained_dtype = next(weight.dtype for weight in policy.model.parameters() if weight.requires_grad)
        head = nn.Linear(width, 1, device="meta", dtype=trained_dtype)
        self.model = BodyAndHead(copy.deepcopy(body), head)
        self._config = _settings(critic, optimizer)
        if compiled:
            compile_layers(self.model)
        if policy.is_bfloat16:
            self.model.narrow()
        if recompute:
            recompute_layers(self.model)
        self._gang = gang
        gang.shard(self.model, keep_root=True, bfloat16=policy.is_bfloat16)
        zeros = {
            f"head.{name}": partial(torch.zeros, local(parameter).shape, dtype=trained_dtype)
            for name, parameter in head.named_parameters()
        }
        prefix = f"{policy.model.base_model_prefix}."
        of_body = {f"body.{name.removeprefix(prefix)}": give for name, give in base.items()}
        rows = zeros | of_body | memory.rows(f"{Path(CRITIC_FILE).stem}/")
        fill(self.model, self.model, rows, policy.device)
        self._parameters = trained_parameters(self.model, memory, "critic_gradient")
        self._optimizer = make_adamw(self._parameters, self._config, memory, Path(CRITIC_FILE).stem)

    def take_settings(self, critic: CriticConfig, optimizer: OptimizerConfig) -> None:
        """The optimizer continues with the settings of another policy of the same shape."""
        self._config = _settings(critic, optimizer)
        configure(self._optimizer, self._config)

    def values(self, rows: PaddedRows) -> Tensor:
        """The value before each completion token is drawn: ``[N]``, with gradient, float32 at least."""
        values: Tensor = self.model(rows)
        return values.squeeze(-1).to(torch.promote_types(values.dtype, torch.float32))

    def fixed_values(self, rows: PaddedRows) -> Tensor:
        """The same without gradient."""
        with torch.no_grad():
            values = self.values(rows)
        self._gang.release(self.model)
        return values

    def start_from(self, policy: CompletionModel) -> None:
        """Copies the policy's body: at the begin, and again after its SFT."""
        body = own_weights(self.model.body)
        for name, tensor in own_weights(policy.model.base_model).items():
            local(body[name]).copy_(local(tensor))

    def gradient_norm(self, tokens: int) -> float:
        """The norm of the critic's gradient, divided by ``tokens``, over all parts of it."""
        return gradient_norm(self._parameters, tokens, self._gang)

    def optimizer_step(self, tokens: int, norm: float, step: int, total_steps: int) -> None:
        """Divides by ``tokens``, clips from ``norm``, steps at the rate of ``step`` on the policy's schedule."""
        apply_gradient(
            self._parameters,
            self._optimizer,
            divisor=tokens,
            norm=norm,
            max_norm=self._config.max_grad_norm,
            lr=learning_rate(self._config, step, total_steps),
        )

    def drop_gradient(self) -> None:
        """Forgets the accumulated gradient."""
        drop_gradient(self._optimizer)

    def gradients(self) -> dict[str, Tensor]:
        """The live gradients by the parameter's name."""
        return gradients(self._parameters)

    def state(self) -> dict[str, Tensor]:
        """The live tensors that a bit-equal continuation needs: weights and moments, in a gang this rank's parts."""
        weights = {f"body.{name}": local(tensor) for name, tensor in own_weights(self.model.body).items()}
        weights |= {f"head.{name}": local(tensor) for name, tensor in named_weights(self.model.head).items()}
        return weights | moments(self._parameters, self._optimizer)


def _settings(critic: CriticConfig, optimizer: OptimizerConfig) -> OptimizerConfig:
    return optimizer.model_copy(update={"lr": critic.lr, "max_grad_norm": critic.max_grad_norm})
