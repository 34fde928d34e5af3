"""The trainer's backend of a policy: one class for each, chosen by ``name``. No backend is imported here."""

from typing import Annotated, Literal

from pydantic import Tag

from ...config_base import Config, NonNegative, chosen_by_name


class TorchTrainerConfig(Config):
    """PyTorch, in a thread of the trainer."""

    name: Literal["torch"] = "torch"


class SimulatedTrainerConfig(Config):
    """Seconds of forward and backward per token of prompt and completion, of each micro-batch beside its tokens, and of
    an optimizer step. Nothing is computed."""

    name: Literal["simulated"] = "simulated"
    token_s: NonNegative = 0.0
    micro_batch_s: NonNegative = 0.0
    optimizer_s: NonNegative = 0.0


TrainerBackendConfig = Annotated[
    Annotated[TorchTrainerConfig, Tag("torch")] | Annotated[SimulatedTrainerConfig, Tag("simulated")],
    chosen_by_name("torch"),
]
"""The section ``trainer`` of a policy."""
