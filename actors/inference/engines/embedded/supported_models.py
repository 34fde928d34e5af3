"""The models that the embedded engine can serve, and their longest context."""

from transformers import PreTrainedModel

from ....errors import UnsupportedModel
from ....model_sources import rotation_limit


def context_of(model: PreTrainedModel, max_context: int | None) -> int:
    """``max_context``, checked against the limit in the model's config, or that limit by default."""
    allowed: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if max_context is None and allowed is None:
        raise UnsupportedModel(
            type(model).__name__, "its config has no max_position_embeddings: set max_context"
        )
    if max_context is not None and allowed is not None and max_context > allowed:
        raise UnsupportedModel(
            type(model).__name__,
            f"max_context is {max_context}, the model has {allowed} positions: lower max_context",
        )
    return max_context or allowed or 0


def refuse_unsupported(model: PreTrainedModel, max_context: int) -> None:
    """Raises UnsupportedModel, with the reason and a remedy, for a model whose answers would be wrong here.
    ``max_context``: tokens of the longest sequence; up to it, attention and rotations must not change."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    other_types = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other_types:
        raise UnsupportedModel(
            name, f"layers of type {', '.join(other_types)} need another cache: use another engine"
        )
    if not model._supports_attention_backend or not model._supports_sdpa:
        raise UnsupportedModel(
            name, "it has its own attention code (no AttentionInterface): use another engine"
        )
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]  # transformers
        raise UnsupportedModel(name, "it has no output embeddings: is it a causal language model?")
    rotated = rotation_limit(model.config)
    if rotated is not None and max_context > rotated:
        raise UnsupportedModel(
            name,
            f"its rotations (longrope) change behind {rotated} tokens, and max_context is {max_context}: set "
            f"engine.max_context to {rotated} or less",
        )
    window: int | None = getattr(config, "sliding_window", None)
    if window is not None and window < max_context and not getattr(config, "layer_types", None):
        raise UnsupportedModel(
            name, f"its sliding window of {window} is shorter than max_context {max_context}"
        )
