"""Settings of an instance's engine: one class for each engine, chosen by ``name``. No engine is imported here."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Tag

from ..config_base import Config, Count, NonNegative, Positive


class EngineOptions(Config):
    """Options that every engine has, and the capabilities that are known without importing it.

    ``max_batch``: sequences that are decoded together. ``max_context``: tokens of one sequence, prompt and completion;
    by default the limit in the model's config.
    """

    exact_draws: ClassVar[bool]
    """The seed of a request alone decides the random numbers of its tokens."""
    resumable: ClassVar[bool]
    """The tokens of an interrupted turn can be given to a later request, which continues them."""
    lora: ClassVar[bool]
    """It serves LoRA adapters of its model."""

    max_batch: Count = 64
    max_context: Count | None = None


class EmbeddedEngineConfig(EngineOptions):
    """The embedded engine (``TransformersEngine``). The cache of keys and values has as many rows as sequences run,
    each as long as the longest."""

    exact_draws: ClassVar[bool] = True
    resumable: ClassVar[bool] = True
    lora: ClassVar[bool] = False

    name: Literal["embedded"] = "embedded"


class SimulatedEngineConfig(EngineOptions):
    """Lengths and times of a simulated engine's answers.

    Lengths, in tokens, are lognormal: ``median_tokens * exp(sigma * z)``, ``z`` standard normal. A decode step of one
    sequence takes ``token_s`` seconds; each further sequence adds ``crowding`` times that. A token of the prompt takes
    ``prompt_share`` of a decode step. Installing new weights takes ``install_s`` seconds.
    """

    exact_draws: ClassVar[bool] = True
    resumable: ClassVar[bool] = True
    lora: ClassVar[bool] = False

    name: Literal["simulated"] = "simulated"
    median_tokens: Positive = 32.0
    sigma: NonNegative = 1.0
    token_s: Positive = 1e-3
    crowding: NonNegative = 0.0
    prompt_share: NonNegative = 0.01
    install_s: NonNegative = 0.0


def _name_of(engine: Any) -> Any:
    """The engine of a section; one without a name is of the embedded engine."""
    return engine.get("name", "embedded") if isinstance(engine, dict) else getattr(engine, "name", "embedded")


EngineConfig = Annotated[
    Annotated[EmbeddedEngineConfig, Tag("embedded")] | Annotated[SimulatedEngineConfig, Tag("simulated")],
    Discriminator(_name_of),
]
"""The section ``engine`` of a policy."""
