"""Architectures and tokenizers as a ``ModelConfig`` names them: the parts of a model that need no torch."""

import difflib
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from .errors import UnsupportedModel
from .messages import ModelConfig
from .model_shape import EXPERTS_OF_A_TOKEN


def routes_to_experts(architecture: PreTrainedConfig) -> bool:
    """True for a mixture of experts (MoE), by the config of a model."""
    decoder = architecture.get_text_config(decoder=True)
    return any(getattr(decoder, name, None) for name in EXPERTS_OF_A_TOKEN)


def architecture_of(model: ModelConfig, *, local_files_only: bool = False) -> PreTrainedConfig:
    """The config of the model's architecture. Raises OSError if ``path`` can't be loaded, ValueError for an unknown
    ``model_type``, UnsupportedModel if its attention is one that ``sdpa`` does not compute.
    """
    if model.path is not None:
        architecture: PreTrainedConfig = AutoConfig.from_pretrained(
            model.path, local_files_only=local_files_only
        )
    else:
        architecture = AutoConfig.for_model(**(model.config or {}))
    decoder: Any = architecture.get_text_config(decoder=True)
    if getattr(decoder, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModel(
            architecture.model_type,
            f"attn_logit_softcapping is {decoder.attn_logit_softcapping}, which neither trainer nor engine computes: "
            "take a model without it",
        )
    if getattr(decoder, "output_router_logits", False):
        # They serve a loss of supervised training alone, and transformers computes it in every forward.
        decoder.output_router_logits = False
    return architecture


def misspelt_keys(model: ModelConfig) -> dict[str, str]:
    """Keys of ``config`` that its architecture does not have, each with the one that is nearly the same: architectures
    keep keys of any name, and compute as without them. ``config`` must be one that ``architecture_of`` takes."""
    config = model.config or {}
    if not config:
        return {}
    default = AutoConfig.for_model(config["model_type"])
    names = [*default.to_dict(), *default.attribute_map]
    # A key that is like none of them may be right: models read some that have no default.
    near = {key: difflib.get_close_matches(key, names, 1, 0.8) for key in config if not hasattr(default, key)}
    return {key: matches[0] for key, matches in near.items() if matches}


def rotation_limit(architecture: PreTrainedConfig) -> int | None:
    """The longest sequence, in tokens, up to which the rotations of the positions don't depend on its length; None
    without a limit.

    With ``longrope`` (Ding et al., arXiv 2402.13753) transformers takes other factors behind
    ``original_max_position_embeddings``, for all positions and for all sequences of a batch: keys in an engine's cache
    would keep the former ones.
    """
    decoder: Any = architecture.get_text_config(decoder=True)
    parameters = getattr(decoder, "rope_parameters", None) or {}
    ropes = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return min(
        (rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"),
        default=None,
    )


def load_tokenizer(model: ModelConfig, *, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model.tokenizer_source``. Raises OSError if it can't be loaded."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        model.tokenizer_source, local_files_only=local_files_only
    )
    return tokenizer
