"""The trainer's backend of a policy: one class for each, chosen by ``name``. No backend is imported here."""

from typing import Annotated, Literal

from pydantic import Tag

from ...config_base import Config, Count, NonNegative, chosen_by_name


class TorchTrainerConfig(Config):
    """PyTorch.

    ``ranks``: processes that the policy is divided over (FSDP2); more than one need a pool. ``tokens_per_forward``: the
    most tokens of one forward and backward, padding included; its activations grow with it.
    ``activation_checkpointing``: the backward computes each layer's activations again, so that they take the memory of
    one layer, and a step a third more time.
    """

    name: Literal["torch"] = "torch"
    ranks: Count = 1
    tokens_per_forward: Count = 16384
    activation_checkpointing: bool = False


class SimulatedTrainerConfig(Config):
    """Seconds of forward and backward per token of prompt and completion, of each micro-batch beside its tokens, and of
    an optimizer step, on one rank; ``ranks`` share the work of a token. Nothing is computed."""

    name: Literal["simulated"] = "simulated"
    ranks: Count = 1
    token_s: NonNegative = 0.0
    micro_batch_s: NonNegative = 0.0
    optimizer_s: NonNegative = 0.0


TrainerBackendConfig = Annotated[
    Annotated[TorchTrainerConfig, Tag("torch")] | Annotated[SimulatedTrainerConfig, Tag("simulated")],
    chosen_by_name("torch"),
]
"""The section ``trainer`` of a policy."""
