"""Settings of an instance's engine: one class for each engine, chosen by ``name``. No engine is imported here."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Tag

from ..config_base import Config, Count, NonNegative, Positive, chosen_by_name


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
    package: ClassVar[str | None] = None
    """The module that the engine needs and that may not be installed."""
    install: ClassVar[str] = ""
    """The command that installs it."""

    max_batch: Count = 64
    max_context: Count | None = None

    @property
    def turns_at_once(self) -> int:
        """The turns that an instance should have: a batch, and some for the places that become free in it."""
        return self.max_batch + max(1, self.max_batch // 8)

    def reproducible(self) -> Self:
        """These options, changed so that a result does not depend on the requests before or beside it."""
        return self.model_copy(update={"max_batch": 1})


class EmbeddedEngineConfig(EngineOptions):
    """The embedded engine (``TransformersEngine``).

    ``prefill_chunk``: tokens of prompts that are computed at once; between two chunks the running sequences get their
    next token. ``kv_cache_bytes``: memory for keys and values of all layers; it grows up to there. The cache has as
    many rows as sequences run, each as long as the longest, so a sequence waits until its row fits. ``prefix_reuse``:
    keys and values of ended sequences are kept there for prompts that begin with the same tokens, until their memory is
    needed or the weights change.
    """

    exact_draws: ClassVar[bool] = True
    resumable: ClassVar[bool] = True
    lora: ClassVar[bool] = False

    name: Literal["embedded"] = "embedded"
    prefill_chunk: Count = 512
    kv_cache_bytes: Count = 4 * 2**30
    prefix_reuse: bool = True

    def reproducible(self) -> Self:
        return super().reproducible().model_copy(update={"prefix_reuse": False})


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


EngineConfig = Annotated[
    Annotated[EmbeddedEngineConfig, Tag("embedded")] | Annotated[SimulatedEngineConfig, Tag("simulated")],
    chosen_by_name("embedded"),
]
"""The section ``engine`` of a policy."""
