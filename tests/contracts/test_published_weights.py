"""Weights from the trainer to the engine: the same names, shapes and dtypes, and the same policy afterwards."""

from pathlib import Path

import pytest
import torch

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.messages import LoraConfig, ModelConfig
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.pretrained import empty_model
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.transport.state import StateTransport


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "adapter"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
async def test_an_engine_computes_what_the_trainer_does(
    private: Path, model_type: str, tied: bool, dtype: str, lora: LoraConfig | None
) -> None:
    architecture = {
        "model_type": model_type, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 16,
        "tie_word_embeddings": tied, "max_position_embeddings": 32,
    }  # fmt: skip
    config = ModelConfig.model_validate({"config": architecture, "tokenizer": "unused", "dtype": dtype})
    policy = TorchPolicy(
        PolicyName("agent"),
        PolicySetup(model=config, lora=lora, credit={AgentName("agent"): CreditConfig()}),
        seed=0,
        total_steps=1,
    )
    served = empty_model(config)
    engine = TransformersEngine(served, [15], max_batch=2)
    async with StateTransport(private) as transport:
        for updates in (0, 10):
            for _ in range(updates):
                policy.sft([((1, 2), (3, 4)), ((2,), (5, 6, 7))])
            handle = await transport.set("agent", policy.weights(), version=updates)
            await transport.get(handle, into=engine.weights())
            engine.weights_loaded(engine.weights())
            tokens = torch.arange(12).reshape(2, 6)
            with (
                torch.inference_mode(),
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"),
            ):
                expected = policy.model(tokens).logits.float()
                got = served(tokens).logits.float()
            torch.testing.assert_close(got, expected, atol=1e-6 if dtype == "float32" else 2e-2, rtol=0)
