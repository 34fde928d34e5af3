"""LoRA policies as their trainer has them: their published adapters, updates and log-probabilities."""

import torch

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import LoraConfig, ModelConfig
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.padding import pad_rows
from flexmarl.actors.trainer.trainer_config import OptimizerConfig, SftConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .vllm_engines import VOCABULARY

RUN_SEED = 5


def policy_of(
    model: ModelConfig, lora: LoraConfig, name: str = "solver", *, adapter: bool = True
) -> TorchPolicy:
    torch.set_num_threads(1)
    setup = PolicySetup(
        model=model,
        lora=lora,
        publishes_adapter=adapter,
        credit={AgentName(name): CreditConfig()},
        optimizer=OptimizerConfig(),
        sft=SftConfig(lr=3e-3),
    )
    return TorchPolicy(PolicyName(name), setup, seed=RUN_SEED, total_steps=1)


def update(policy: TorchPolicy) -> None:
    policy.sft([((1, 2), (3, 4, 5)), ((7,), (8, 9))])


def logprobs(policy: TorchPolicy, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        found: list[float] = policy.models.completions.logprobs(
            pad_rows([(prompt, tokens)], VOCABULARY)
        ).tolist()
    return found
