"""Trainers and embedded engines leave out the attention of cuDNN, which plans for each shape."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model
from flexmarl.actors.trainer.backends.torch_policy.completion_model import CompletionModel

CONFIG = ModelConfig(
    config={
        "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16, "max_position_embeddings": 32,
    },
    tokenizer="unused",
)  # fmt: skip


@pytest.fixture(autouse=True)
def with_cudnn() -> Iterator[None]:
    before = is_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def is_enabled() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]  # torch


@pytest.mark.parametrize(
    "build",
    [
        lambda model: CompletionModel(CONFIG, model),
        lambda model: TransformersEngine(model, (), max_batch=1),
    ],
    ids=["trainer", "engine"],
)
def test_models_are_computed_without_it(build: Callable[[Any], object]) -> None:
    build(empty_model(CONFIG))
    assert not is_enabled()
