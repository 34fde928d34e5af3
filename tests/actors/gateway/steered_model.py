"""A tiny real model that writes some random bytes and then calls a tool, in every turn.

Its attention and its sampling are real, but for two things that its weights prefer: behind any byte it may begin a
call, after some seven of them on average, and a call once begun is written to its end. The bytes are rarely valid
UTF-8: a text that is encoded again has other tokens than those that were generated.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken
from torch import Tensor

from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model

from ..chat.qwen3_tokenizer import MERGES, qwen3_tokenizer
from ..inference.test_instance_turns import ARCHITECTURE

BYTES: Final = 256 + len(MERGES)
"""The first tokens: bytes, and some that are several."""


def steered_model(
    folder: Path, tool: str, arguments: Mapping[str, Any]
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model and its weights. Its tokenizer has the call as a token, and is saved in ``folder``."""
    tokenizer = qwen3_tokenizer()
    call = f"\n{json.dumps({'name': tool, 'arguments': arguments})}\n"
    tokenizer.add_tokens([AddedToken(call, special=False, normalized=False)])
    tokenizer.save_pretrained(folder)
    architecture = {**ARCHITECTURE, "vocab_size": len(tokenizer)}
    model = ModelConfig(config=architecture, tokenizer=str(folder), renderer="qwen3")
    chain = tokenizer.convert_tokens_to_ids(["<tool_call>", call, "</tool_call>", "<|im_end|>"])
    return model, _weights(model, chain)


def _weights(model: ModelConfig, chain: list[int]) -> dict[str, Tensor]:
    """Random ones, but for the first features: 0 is that of bytes, each next one that of a token of the chain."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(tensor.shape, generator=generator) / 10
        if tensor.dim() > 1
        else torch.ones_like(tensor)
        for name, tensor in empty_model(model).state_dict().items()
    }
    inputs, outputs = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    features = len(chain)
    for matrix in (inputs, outputs):
        matrix *= 3
        matrix[:, :features] = 0.0
    inputs[:BYTES, 0] = 1.0
    outputs[BYTES:, 0] = -10.0
    outputs[chain[0], 0] = 3.0
    for feature, (token, following) in enumerate(pairwise(chain), start=1):
        inputs[token] = 0.0
        inputs[token, feature] = 1.0
        outputs[following, feature] = 10.0
    return weights
