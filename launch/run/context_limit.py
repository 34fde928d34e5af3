"""The longest sequence of a policy."""

from typing import Any

from ..config.config_sections import PolicyConfig


def context_limit(policy: PolicyConfig) -> int | None:
    """The longest sequence of the policy's engine; None if it is not known without it, as for an endpoint, or where
    vLLM computes it from scaled rotations."""
    model, limit = policy.used_model, policy.engine.max_context
    if model is None or limit is not None:
        return limit
    # Imported here: transformers takes seconds, and a simulated run needs nothing of it.
    from ...actors.model_sources import architecture_of

    decoder: Any = architecture_of(model).get_text_config(decoder=True)
    rope = getattr(decoder, "rope_parameters", None) or {}
    if policy.engine.name != "embedded" and rope.get("rope_type", "default") != "default":
        return None
    return getattr(decoder, "max_position_embeddings", None)
