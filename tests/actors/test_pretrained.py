"""Models and tokenizers by a ``ModelConfig``: with their weights, or the architecture alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.errors import UnsupportedModel
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.model_sources import load_tokenizer, rotation_limit
from flexmarl.actors.pretrained import empty_model, load_model, unset_model

TIED = {
    "model_type": "llama", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "max_position_embeddings": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FROM_CONFIG = ModelConfig(config=TIED, tokenizer="none")


@pytest.fixture
def saved(tmp_path: Path) -> ModelConfig:
    """A folder with a model and a tokenizer of two words."""
    load_model(FROM_CONFIG, torch.float32).save_pretrained(tmp_path)
    fast: Any = PreTrainedTokenizerFast  # untyped
    fast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}))).save_pretrained(tmp_path)
    return ModelConfig(path=str(tmp_path))


def test_an_empty_model_uses_no_random_numbers_and_keeps_tied_weights_tied() -> None:
    state = torch.random.get_rng_state()
    model: Any = empty_model(FROM_CONFIG)
    assert torch.random.get_rng_state().equal(state)
    assert model.dtype == torch.float32 and not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.lm_head.weight.any() and model.model.norm.weight.all()
    source: Any = load_model(FROM_CONFIG, torch.float32)
    model.load_state_dict(source.state_dict())
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert model(input_ids=tokens).logits.equal(source(input_ids=tokens).logits)


def test_an_empty_model_has_the_dtype_of_its_config(saved: ModelConfig) -> None:
    for config in (FROM_CONFIG, saved):
        model = empty_model(config.model_copy(update={"dtype": "bfloat16"}))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_unset_model_uses_no_random_numbers_and_reads_no_weights_of_a_path(saved: ModelConfig) -> None:
    state = torch.random.get_rng_state()
    for path in Path(saved.path or "").glob("*.safetensors"):
        path.unlink()
    for config in (FROM_CONFIG, saved):
        model: Any = unset_model(config.model_copy(update={"dtype": "bfloat16"}), torch.float32)
        assert torch.random.get_rng_state().equal(state)
        assert not model.training and {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert all(parameter.requires_grad and parameter.is_meta for parameter in model.parameters())
        source: Any = load_model(FROM_CONFIG, torch.float32)
        state = torch.random.get_rng_state()
        model.load_state_dict(source.state_dict(), assign=True)
        tokens = torch.tensor([[1, 2, 3, 4]])
        assert model(input_ids=tokens).logits.equal(source(input_ids=tokens).logits)


def test_weights_of_a_config_follow_the_global_generator() -> None:
    torch.manual_seed(3)
    first: Any = load_model(FROM_CONFIG, torch.float32)
    torch.manual_seed(3)
    again: Any = load_model(FROM_CONFIG, torch.float32)
    other: Any = load_model(FROM_CONFIG, torch.float32)
    assert first.lm_head.weight.equal(again.lm_head.weight)
    assert not first.lm_head.weight.equal(other.lm_head.weight)


def test_a_path_gives_weights_and_the_empty_model_only_their_shapes(saved: ModelConfig) -> None:
    loaded: Any = load_model(saved, torch.float32)
    again: Any = load_model(saved, torch.float32)
    empty: Any = empty_model(saved)
    assert loaded.lm_head.weight.equal(again.lm_head.weight) and loaded.lm_head.weight.any()
    assert empty.lm_head.weight.shape == loaded.lm_head.weight.shape and not empty.lm_head.weight.any()


@pytest.mark.parametrize("load", [empty_model, lambda config: load_model(config, torch.float32)])
def test_capped_attention_is_refused_by_trainer_and_engine(load: Callable[[ModelConfig], Any]) -> None:
    sizes = {key: value for key, value in TIED.items() if key != "model_type"}
    capped = sizes | {"model_type": "gemma2", "layer_types": ["full_attention"] * 2}
    with pytest.raises(UnsupportedModel, match=r"gemma2: attn_logit_softcapping is 50"):
        load(ModelConfig(config=capped, tokenizer="none"))
    assert load(ModelConfig(config=capped | {"attn_logit_softcapping": None}, tokenizer="none"))


def test_only_longrope_has_a_limit_of_its_rotations() -> None:
    assert rotation_limit(empty_model(FROM_CONFIG).config) is None


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    missing = ModelConfig(path=str(tmp_path / "missing"))
    for load in (empty_model, load_tokenizer, lambda config: load_model(config, torch.float32)):
        with pytest.raises(OSError, match="missing"):
            load(missing)


def test_the_tokenizer_is_its_own_or_that_of_the_path(saved: ModelConfig) -> None:
    assert saved.tokenizer_source == saved.path
    assert saved.model_copy(update={"tokenizer": "other"}).tokenizer_source == "other"
    assert FROM_CONFIG.tokenizer_source == "none"
    assert load_tokenizer(saved).get_vocab() == {"a": 0, "b": 1}
