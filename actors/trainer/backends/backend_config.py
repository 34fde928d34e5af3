"""The trainer's backend of a policy: one class for each, chosen by ``name``. No backend is imported here."""

from typing import Annotated, Literal, Self

from pydantic import Tag, model_validator

from ...config_base import Config, Count, NonNegative, chosen_by_name


class _Ranks(Config):
    """``ranks``: processes that the policy is divided over; more than one need a pool. ``min_ranks``: it is resumed on
    so many slots if no more are free; None: always on ``ranks``."""

    ranks: Count = 1
    min_ranks: Count | None = None

    @property
    def fewest_ranks(self) -> int:
        return self.ranks if self.min_ranks is None else self.min_ranks

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.fewest_ranks > self.ranks:
            raise ValueError(f"min_ranks={self.min_ranks} is more than ranks={self.ranks}")
        return self


class TorchTrainerConfig(_Ranks):
    """PyTorch.

    ``ranks``: processes that the policy is divided over (FSDP2); more than one need a pool. ``min_ranks``: it is
    resumed on so many slots if no more are free; None: always on ``ranks``. ``tokens_per_forward``: the most tokens of
    one forward and backward, padding included; its activations grow with it.
    ``activation_checkpointing``: the backward computes each layer's activations again, so that they take the memory of
    one layer, and a step a third more time.
    """

    name: Literal["torch"] = "torch"
    tokens_per_forward: Count = 16384
    activation_checkpointing: bool = False


class SimulatedTrainerConfig(_Ranks):
    """Seconds of forward and backward per token of prompt and completion, of each micro-batch beside its tokens, and of
    an optimizer step, on one rank; ``ranks`` share the work of a token. Nothing is computed."""

    name: Literal["simulated"] = "simulated"
    token_s: NonNegative = 0.0
    micro_batch_s: NonNegative = 0.0
    optimizer_s: NonNegative = 0.0


TrainerBackendConfig = Annotated[
    Annotated[TorchTrainerConfig, Tag("torch")] | Annotated[SimulatedTrainerConfig, Tag("simulated")],
    chosen_by_name("torch"),
]
"""The section ``trainer`` of a policy."""
