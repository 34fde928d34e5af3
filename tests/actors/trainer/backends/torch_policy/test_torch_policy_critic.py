"""One policy with a critic: PPO's gradients, the critic's first values and its learning, saving and loading."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.errors import CheckpointIncomplete, NonFiniteGradient
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.critic_model import CriticModel
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.padding import pad_rows
from flexmarl.actors.trainer.trainer_config import OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from ...algorithm import algorithm
from .policies import SMALLER_MODEL

PROMPTS = [((index % 10, 11), (index % 10, 12, 13)) for index in range(16)]


def make_policy(
    lr: float = 1e-2,
    model: dict[str, Any] | None = None,
    seed: int = 0,
    dtype: Any = "float32",
    **given: Any,
) -> TorchPolicy:
    halves = algorithm(**{"name": "ppo", **given})
    return TorchPolicy(
        PolicyName("solver"),
        PolicySetup(
            model=ModelConfig(config=SMALLER_MODEL | (model or {}), tokenizer="unused", dtype=dtype),
            credit={AgentName("solver"): halves.credit},
            loss=halves.loss,
            optimizer=OptimizerConfig(lr=lr, schedule="linear", warmup_steps=2),
        ),
        seed=seed,
        total_steps=100,
    )


def critic_of(policy: TorchPolicy) -> CriticModel:
    assert policy._critic is not None
    return policy._critic


def make_samples(seed: int, version: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for trajectory in range(6):
        tokens = tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9)))
        reward = rng.choice((0.0, 0.5, 1.0))
        samples.append(
            Sample(
                f"1:q_0_{trajectory}", "solver", 1, version, "1:q", reward, reward,
                tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9))),
                tokens, tuple(rng.uniform(-3.2, -2.4) for _ in tokens),
            )
        )  # fmt: skip
    return samples


def make_tokenizer() -> PreTrainedTokenizerFast:
    fast: Any = PreTrainedTokenizerFast  # its constructor has no types
    return fast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))  # type: ignore[no-any-return]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.cat([g.flatten() for g in gradients if g is not None])


def state(policy: TorchPolicy) -> dict[str, torch.Tensor]:
    files = policy.models.files()
    return {f"{file} {name}": t.clone() for file, tensors in files.items() for name, t in tensors.items()}


def unequal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


# --------------------------------------------------------------------------- the gradient


def plain_losses(
    policy: TorchPolicy, reference: TorchPolicy, sample: Sample
) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy's loss and the critic's of one sample, token by token from the end, summed over its tokens."""
    critic, start = critic_of(policy).model, len(sample.prompt_tokens) - 1
    row = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
    logprobs = policy.model(input_ids=row).logits[0].log_softmax(-1)
    with torch.no_grad():
        anchor = reference.model(input_ids=row).logits[0].log_softmax(-1)
    values = critic.head(critic.body(input_ids=row).last_hidden_state)[0, :, 0]
    policy_loss = value_loss = torch.zeros((), dtype=torch.float64)
    later_value = later_advantage = 0.0
    for t in reversed(range(len(sample.tokens))):
        token, old, value = sample.tokens[t], float(torch.tensor(sample.logprobs[t])), values[start + t]
        reward = -0.1 * (old - float(anchor[start + t, token]))
        if t == len(sample.tokens) - 1:
            reward += sample.reward
        advantage = reward + 0.9 * later_value - value.item() + 0.9 * 0.8 * later_advantage
        logprob = logprobs[start + t, token]
        weight = torch.exp(logprob.detach() - old).clamp(max=2.0)
        ratio = torch.exp(logprob - logprob.detach())
        policy_loss = policy_loss - weight * torch.minimum(
            ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
        )
        value_loss = value_loss + (value - (advantage + value.item())) ** 2 / 2
        later_value, later_advantage = value.item(), advantage
    return policy_loss, value_loss


def test_both_gradients_are_those_of_the_plain_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm: dict[str, Any] = {"kl_coefficient": 0.1, "critic": {"gamma": 0.9, "lam": 0.8}}
    policy, plain, reference = (make_policy(**algorithm) for _ in range(3))
    rng = torch.Generator().manual_seed(0)
    head, shift = torch.randn(1, 32, generator=rng), torch.randn(1, generator=rng)
    for each in (policy, plain, reference):
        each.model.double()
        each.models.reference.model.double()  # type: ignore[union-attr]
        critic = critic_of(each).model.double()
        with torch.no_grad():
            critic.head.weight.copy_(0.1 * head)
            critic.head.bias.copy_(shift)
    with torch.no_grad():  # else policy and reference agree
        for each in (policy, plain):
            for parameter in each.model.parameters():
                parameter.mul_(1.1)
    samples = make_samples(1)
    for sample in samples:
        policy.accumulate([sample])
    totals = torch.zeros(2, dtype=torch.float64)
    for sample in samples:
        losses = torch.stack(plain_losses(plain, reference, sample))
        torch.autograd.backward(losses.sum())
        totals += losses.detach()
    for found, expected in ((policy.model, plain.model), (critic_of(policy).model, critic_of(plain).model)):
        wanted = gradient(expected)
        assert float((gradient(found) - wanted).norm() / wanted.norm()) < 1e-6
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda optimizer: None)  # its moments are float32
    stats = policy.optimizer_step()
    assert [stats.figures["loss"], stats.figures["value_loss"]] == pytest.approx(
        (totals / stats.tokens).tolist(), rel=1e-6
    )


def test_every_sample_is_trained_on_also_where_rewards_are_zero_or_equal() -> None:
    policy = make_policy()
    samples = [sample for sample in make_samples(1) if sample.reward == 0.0]
    assert samples and policy.accumulate(samples).trained_samples == len(samples)
    stats = policy.optimizer_step()
    assert stats.figures["value_loss"] == 0.0 and "explained_variance" not in stats.figures, (
        "nothing was expected, nothing came"
    )


def test_without_a_critic_there_is_nothing_to_say_of_it() -> None:
    policy = make_policy(name="grpo")
    policy.accumulate(make_samples(1))
    stats = policy.optimizer_step()
    assert policy._critic is None and not {"value_loss", "explained_variance"} & stats.figures.keys()


@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_leaves_both_models_alone(whose: str) -> None:
    policy = make_policy()
    policy.accumulate(make_samples(2))
    before = state(policy)
    broken = policy.model if whose == "policy" else critic_of(policy).model
    parameter = next(broken.parameters())
    assert parameter.grad is not None
    parameter.grad.view(-1)[0] = torch.nan
    with pytest.raises(NonFiniteGradient, match="solver"):
        policy.optimizer_step()
    assert unequal(before, state(policy)) == [] and policy.version == 0


# --------------------------------------------------------------------------- what it starts from, what it learns


@pytest.mark.parametrize("tied", [False, True])
def test_the_critic_has_the_policys_body_as_its_sft_left_it_and_foresees_nothing(tied: bool) -> None:
    policy = make_policy(model={"tie_word_embeddings": tied})
    policy.sft(PROMPTS)
    policy.sft_done()
    body, own = critic_of(policy).model.body.state_dict(), policy.model.base_model.state_dict()
    assert unequal(body, own) == []
    assert {t.data_ptr() for t in body.values()}.isdisjoint(t.data_ptr() for t in own.values())
    rows = pad_rows(PROMPTS, 16)
    assert not critic_of(policy).values(rows).any()
    assert "lm_head.weight" not in critic_of(policy).state()
    assert not any(
        "critic" in name or "head" in name for name in policy.weights() if name != "lm_head.weight"
    )


def test_bfloat16_values_come_from_float32_weights_in_float32() -> None:
    policy = make_policy(dtype="bfloat16")
    torch.nn.init.constant_(critic_of(policy).model.head.weight, 0.1)
    values = critic_of(policy).values(pad_rows(PROMPTS, 16))
    assert values.dtype == torch.float32
    assert {parameter.dtype for parameter in critic_of(policy).model.parameters()} == {torch.float32}
    policy.accumulate(make_samples(1))
    assert policy.optimizer_step().figures["grad_norm"] > 0


def drawn(policy: TorchPolicy, rng: random.Random, count: int) -> list[Sample]:
    """One token each, drawn by the policy; rewarded if it is the prompt's, and by 1 more after an even prompt."""
    prompts = [(rng.randrange(8), 14) for _ in range(count)]
    with torch.no_grad():
        logprobs = policy.model(input_ids=torch.tensor(prompts)).logits[:, -1].log_softmax(-1)
    samples = []
    for number, (prompt, row) in enumerate(zip(prompts, logprobs, strict=True)):
        (token,) = rng.choices(range(16), row.exp().tolist())
        reward = float(token == prompt[0]) + (prompt[0] % 2 == 0)
        name, drawn_with = f"1:q{number}", (float(row[token]),)
        samples.append(
            Sample(
                f"{name}_0_0",
                "solver",
                1,
                policy.version,
                name,
                reward,
                reward,
                prompt,
                (token,),
                drawn_with,
            )
        )
    return samples


def test_the_critic_learns_what_to_expect_and_the_policy_to_do_better() -> None:
    policy = make_policy(critic={"lr": 1e-2})
    rng, rewards, losses, explained = random.Random(0), [], [], []
    for _ in range(40):
        samples = drawn(policy, rng, 64)
        for index in range(0, 64, 16):
            policy.accumulate(samples[index : index + 16])
        stats = policy.optimizer_step()
        rewards.append(sum(sample.reward for sample in samples) / 64)
        losses.append(stats.figures["value_loss"])
        explained.append(stats.figures["explained_variance"])
    assert explained[0] == pytest.approx(0.0, abs=1e-6), "it began by expecting the same of all"
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert sum(explained[-5:]) / 5 > 0.5
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


# --------------------------------------------------------------------------- files


def step(policy: TorchPolicy) -> tuple[float, float | None]:
    policy.accumulate(make_samples(policy.version, policy.version))
    stats = policy.optimizer_step()
    return stats.figures["loss"], stats.figures["value_loss"]


@pytest.mark.parametrize("model", [{}, {"attention_dropout": 0.2}, {"tie_word_embeddings": True}])
def test_going_on_from_a_folder_is_bit_equal_to_not_having_stopped(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    unbroken = make_policy(model=model, kl_coefficient=0.1)
    for _ in range(2):
        step(unbroken)
    unbroken.save(tmp_path, make_tokenizer())
    resumed = make_policy(model=model, kl_coefficient=0.1, seed=99)
    resumed.accumulate(make_samples(5))  # and loading drops what it had accumulated
    torch.rand(5)
    resumed.load(tmp_path)
    assert unequal(state(unbroken), state(resumed)) == []
    for _ in range(3):
        assert step(unbroken) == step(resumed)
        assert unequal(state(unbroken), state(resumed)) == []


def test_a_folder_without_a_critic_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    make_policy(name="grpo").save(tmp_path, make_tokenizer())
    policy = make_policy()
    before = state(policy)
    with pytest.raises(CheckpointIncomplete, match=r"critic\.safetensors"):
        policy.load(tmp_path)
    assert unequal(before, state(policy)) == []
