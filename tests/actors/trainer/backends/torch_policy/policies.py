"""A small policy with samples, and its loss written out plainly."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.objective.users_loss import UsersLoss
from flexmarl.actors.trainer.trainer_config import LossConfig, OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from ...algorithm import advantage

torch.set_num_threads(1)
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 16,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
SMALLER_MODEL = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 16,
    "tie_word_embeddings": False, "max_position_embeddings": 32, "initializer_range": 0.3,
}  # fmt: skip
OPTIMIZER = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), schedule="linear", warmup_steps=2, weight_decay=0.01)


def make_policy(
    name: str = "solver",
    seed: int = 0,
    optimizer: OptimizerConfig = OPTIMIZER,
    trainer: TorchTrainerConfig | None = None,
    **model: Any,
) -> TorchPolicy:
    return TorchPolicy(
        PolicyName(name),
        PolicySetup(
            model=ModelConfig(config=MODEL | model, tokenizer="unused"),
            credit={AgentName("solver"): CreditConfig()},
            loss=LossConfig(name="dapo"),  # a token of any sequence weighs the same
            optimizer=optimizer,
            trainer=trainer or TorchTrainerConfig(),
        ),
        seed=seed,
        total_steps=10,
    )


def make_double_policy(
    name: str,
    credit: Mapping[AgentName, CreditConfig],
    loss: LossConfig,
    reference_scale: float,
    *,
    users_loss: UsersLoss | None = None,
    **settings: Any,
) -> TorchPolicy:
    """The smaller model in double precision, so that only the order of a sum is left to differ. The reference differs
    from it by the factor ``reference_scale``, and the critic's values are not 0. ``settings``: of the setup."""
    setup = PolicySetup(
        model=ModelConfig(config=SMALLER_MODEL, tokenizer="unused"),
        credit=dict(credit),
        loss=loss,
        **{"optimizer": OptimizerConfig(lr=1e-2, max_grad_norm=1e9)} | settings,
    )
    policy = TorchPolicy(PolicyName(name), setup, seed=0, total_steps=10, users_loss=users_loss)
    policy.model.double()
    if policy.models.reference is not None:
        policy.models.reference.model.double()
        for parameter in policy.models.reference.model.parameters():
            parameter.mul_(reference_scale)
    if policy._critic is not None:
        torch.nn.init.constant_(policy._critic.model.double().head.weight, 0.1)
    return policy


def make_samples(seed: int, groups: int = 3, group_size: int = 4, version: int = 0) -> list[Sample]:
    """Groups of uneven prompts and completions; the last group's rewards are all equal."""
    rng = random.Random(seed)
    samples = []
    for group in range(groups):
        rewards = [rng.choice((0.0, 0.5, 1.0)) for _ in range(group_size)]
        rewards[:2] = (0.0, 1.0)
        if group == groups - 1:
            rewards = [1.0] * group_size
        for index, reward in enumerate(rewards):
            tokens = tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9)))
            samples.append(
                Sample(
                    sample_id=f"q{group}_0_{index}",
                    agent="solver",
                    step=version,
                    policy_version=version,
                    group=f"q{group}",
                    reward=reward,
                    advantage=advantage(reward, rewards),
                    group_size=group_size,
                    query_position=group,
                    prompt_tokens=tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9))),
                    tokens=tokens,
                    logprobs=tuple(rng.uniform(-3.2, -2.4) for _ in tokens),
                )
            )
    return samples


def reference_loss(policy: TorchPolicy, samples: Sequence[Sample], temperature: float = 1.0) -> torch.Tensor:
    """The summed loss token by token, row by row, zero advantages included, written out plainly."""
    total = torch.zeros((), dtype=next(policy.model.parameters()).dtype)
    for sample in samples:
        row = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
        logprobs = (policy.model(input_ids=row).logits[0] / temperature).log_softmax(-1)
        for index, (token, old) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
            logprob = logprobs[len(sample.prompt_tokens) + index - 1, token]
            weight = torch.exp(logprob.detach() - torch.tensor(old, dtype=torch.float32)).clamp(max=2.0)
            ratio = torch.exp(logprob - logprob.detach())
            total = total - weight * torch.minimum(
                ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage
            )
    return total


def gradient(policy: TorchPolicy) -> torch.Tensor:
    gradients = [parameter.grad for parameter in policy.model.parameters()]
    return torch.cat([g.flatten() for g in gradients if g is not None])


def stepped_gradient(policy: TorchPolicy, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The divided gradient that the optimizers would step with, the critic's behind the policy's; they take no step."""
    seen: list[torch.Tensor] = []
    trained = [(policy.model, policy._optimizer)]
    if policy._critic is not None:
        trained.append((policy._critic.model, policy._critic._optimizer))
    for model, optimizer in trained:

        def noted(model: torch.nn.Module = model) -> None:
            seen.extend(p.grad.flatten().clone() for p in model.parameters() if p.grad is not None)

        monkeypatch.setattr(optimizer, "step", noted)
    policy.optimizer_step()
    return torch.cat(seen)


def parameters(policy: TorchPolicy) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for tensor in policy.weights().values()])


def moments_of(policy: TorchPolicy) -> torch.Tensor:
    return torch.cat([m.flatten() for state in policy._optimizer.state.values() for m in state.values()])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# --------------------------------------------------------------------------- the gradient


def replace_tokens(sample: Sample, tokens: tuple[int, ...]) -> Sample:
    fields = {name: getattr(sample, name) for name in Sample.__slots__}
    return Sample(**fields | {"tokens": tokens, "logprobs": (-2.8,) * len(tokens)})


# --------------------------------------------------------------------------- construction and SFT

EXAMPLES = [((index % 10, 11), (index % 10, 12, 13)) for index in range(32)]
