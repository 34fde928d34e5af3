"""The text codec of a model that has a tokenizer."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..messages import ModelConfig
from .renderer_codec import RendererCodec
from .tokenizer_codec import TokenizerCodec


def model_codec(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizerCodec:
    """The codec that ``model.renderer`` names. A folder's name is that of no family, so ``auto`` imports nothing."""
    is_folder = Path(model.tokenizer_source).is_dir()
    if model.renderer == "template" or (model.renderer == "auto" and is_folder):
        return TokenizerCodec(tokenizer, model.template_options)
    return RendererCodec(tokenizer, model.renderer, model.template_options)
