"""One policy on one rank: the gradient, the step, the SFT."""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.errors import NonFiniteGradient, StaleSample
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.advantage import group_advantage
from flexmarl.actors.trainer.backends.policy_backend import PolicyBackend, StepStats
from flexmarl.actors.trainer.backends.torch_policy import forward_batches
from flexmarl.actors.trainer.backends.torch_policy.adamw import learning_rate
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.padding import split_by_length
from flexmarl.actors.trainer.trainer_config import CreditConfig, LossConfig, OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup

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
OPTIMIZER = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), schedule="linear", warmup_steps=2, weight_decay=0.01)


def make_policy(
    name: str = "solver", seed: int = 0, optimizer: OptimizerConfig = OPTIMIZER, **model: Any
) -> TorchPolicy:
    return TorchPolicy(
        PolicyName(name),
        PolicySetup(
            model=ModelConfig(config=MODEL | model, tokenizer="unused"),
            credit={AgentName("solver"): CreditConfig()},
            loss=LossConfig(name="dapo"),  # a token of any sequence weighs the same
            optimizer=optimizer,
        ),
        seed=seed,
        total_steps=10,
    )


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
                    group_rewards=tuple(rewards),
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
        advantage = group_advantage(sample.reward, sample.group_rewards, scale=True)
        row = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
        logprobs = (policy.model(input_ids=row).logits[0] / temperature).log_softmax(-1)
        for index, (token, old) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
            logprob = logprobs[len(sample.prompt_tokens) + index - 1, token]
            weight = torch.exp(logprob.detach() - torch.tensor(old, dtype=torch.float32)).clamp(max=2.0)
            ratio = torch.exp(logprob - logprob.detach())
            total = total - weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return total


def gradient(policy: TorchPolicy) -> torch.Tensor:
    gradients = [parameter.grad for parameter in policy.model.parameters()]
    return torch.cat([g.flatten() for g in gradients if g is not None])


def parameters(policy: TorchPolicy) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for tensor in policy.weights().values()])


def moments_of(policy: TorchPolicy) -> torch.Tensor:
    return torch.cat([m.flatten() for state in policy._optimizer.state.values() for m in state.values()])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_is_a_policy_backend() -> None:
    backend: PolicyBackend = make_policy()
    assert backend.version == 0


# --------------------------------------------------------------------------- the gradient


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@settings(max_examples=12, deadline=None)
@given(data=st.data(), seed=st.integers(0, 100))
def test_any_order_and_split_gives_the_one_batch_gradient(
    dtype: torch.dtype, tolerance: float, data: st.DataObject, seed: int
) -> None:
    samples = make_samples(seed)
    whole, cut = make_policy(), make_policy()
    for policy in (whole, cut):
        policy.model.to(dtype)
    whole.accumulate(samples)

    shuffled = data.draw(st.permutations(samples))
    while shuffled:
        size = data.draw(st.integers(1, len(shuffled)))
        cut.accumulate(shuffled[:size])
        shuffled = shuffled[size:]

    assert relative_error(gradient(cut), gradient(whole)) < tolerance


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_plain_loss(temperature: float) -> None:
    samples = [replace(sample, temperature=temperature) for sample in make_samples(1)]
    policy, plain = make_policy(), make_policy()
    for each in (policy, plain):
        each.model.double()
    policy.accumulate(samples)
    loss = reference_loss(plain, samples, temperature)
    torch.autograd.backward(loss)
    # Advantages and the engine's log-probabilities are float32: that is what limits the agreement.
    assert relative_error(gradient(policy), gradient(plain)) < 1e-6


def test_long_and_short_rows_in_one_batch_give_the_same_gradient() -> None:
    """Uneven enough that the batch is computed in several forwards."""
    rng = random.Random(0)
    samples = make_samples(2, groups=2, group_size=16)
    long = tuple(rng.randrange(16) for _ in range(60))
    samples[0] = replace_tokens(samples[0], long)
    policy, plain = make_policy(), make_policy()
    assert len(policy._chunks(policy._checked(samples))) == 2
    policy.accumulate(samples)
    torch.autograd.backward(reference_loss(plain, samples))
    assert relative_error(gradient(policy), gradient(plain)) < 1e-5


def test_a_bound_on_the_tokens_of_a_forward_leaves_the_gradient_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = make_samples(2, groups=2, group_size=16)
    whole, bounded = make_policy(), make_policy()
    assert len(whole._chunks(whole._checked(samples))) == 1
    whole.accumulate(samples)
    monkeypatch.setattr(
        forward_batches, "split_by_length", functools.partial(split_by_length, most_tokens=40)
    )
    forwards = [chunk.rows.input_ids.numel() for chunk in bounded._chunks(bounded._checked(samples))]
    assert len(forwards) > 4 and max(forwards) <= 40
    bounded.accumulate(samples)
    assert relative_error(gradient(bounded), gradient(whole)) < 1e-5


def replace_tokens(sample: Sample, tokens: tuple[int, ...]) -> Sample:
    fields = {name: getattr(sample, name) for name in Sample.__slots__}
    return Sample(**fields | {"tokens": tokens, "logprobs": (-2.8,) * len(tokens)})


def test_on_policy_ratios_are_one() -> None:
    policy = make_policy()
    samples = []
    for sample in make_samples(3):
        row = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
        with torch.no_grad():
            logprobs = (policy.model(input_ids=row).logits[0] / 0.7).log_softmax(-1)
        start = len(sample.prompt_tokens) - 1
        drawn = tuple(float(logprobs[start + i, token]) for i, token in enumerate(sample.tokens))
        fields = {name: getattr(sample, name) for name in Sample.__slots__}
        samples.append(Sample(**fields | {"logprobs": drawn, "temperature": 0.7}))
    policy.accumulate(samples)
    stats = policy.optimizer_step()
    assert stats.clip_fraction == 0.0
    assert stats.ratio_deviation < 1e-5


def test_stats_count_all_tokens_and_the_trained_ones() -> None:
    samples = make_samples(4)
    samples[0] = replace(samples[0], logprobs=(-9.0,) * len(samples[0].tokens))  # beyond the weight's bound
    advantages = [group_advantage(s.reward, s.group_rewards, scale=True) for s in samples]
    assert 0.0 in advantages
    policy = make_policy()
    stats = policy.accumulate(samples)
    assert stats.samples == len(samples)
    assert stats.tokens == sum(len(s.tokens) for s in samples)
    assert stats.trained_samples == sum(map(bool, advantages))
    assert stats.seconds > 0.0
    step = policy.optimizer_step()
    assert (step.samples, step.tokens) == (stats.samples, stats.tokens)
    assert 0.0 < step.clip_fraction < 1.0


def test_loss_and_ratio_deviation_are_those_of_the_plain_computation() -> None:
    samples = make_samples(4)
    policy, plain = make_policy(), make_policy()
    ratios = []
    for sample in samples:
        if group_advantage(sample.reward, sample.group_rewards, scale=True):
            row = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
            with torch.no_grad():
                logprobs = plain.model(input_ids=row).logits[0].log_softmax(-1)
            start = len(sample.prompt_tokens) - 1
            ratios += [
                math.exp(float(logprobs[start + i, token]) - sample.logprobs[i])
                for i, token in enumerate(sample.tokens)
            ]
    policy.accumulate(samples[:5])
    policy.accumulate(samples[5:])
    stats = policy.optimizer_step()
    assert 0 < len(ratios) < stats.tokens
    assert stats.loss == pytest.approx(reference_loss(plain, samples).item() / stats.tokens, rel=1e-4)
    assert stats.ratio_deviation == pytest.approx(fmean(abs(ratio - 1) for ratio in ratios), rel=1e-4)


# --------------------------------------------------------------------------- refusals


def test_a_stale_sample_is_refused_and_nothing_accumulated() -> None:
    policy = make_policy()
    samples = make_samples(5)
    samples[-1] = make_samples(5, version=1)[-1]
    with pytest.raises(StaleSample, match=f"{samples[-1].sample_id}.*version 1.*solver.*version 0"):
        policy.accumulate(samples)
    assert not gradient(policy).any()
    assert policy.optimizer_step().samples == 0
    with pytest.raises(StaleSample):
        policy.accumulate(make_samples(5, version=0))


@pytest.mark.parametrize(
    "change",
    [{"logprobs": (-1.0,)}, {"tokens": (), "logprobs": ()}, {"prompt_tokens": ()}, {"prompt_tokens": (16,)}],
)
def test_a_malformed_sample_is_refused_and_nothing_accumulated(change: dict[str, Any]) -> None:
    samples = make_samples(6)
    fields = {name: getattr(samples[0], name) for name in Sample.__slots__}
    samples[1] = Sample(**fields | {"tokens": (1, 2), "logprobs": (-1.0, -1.0)} | change)
    policy = make_policy()
    with pytest.raises(ValueError):  # the message differs by case, the outcome does not
        policy.accumulate(samples)
    assert not gradient(policy).any()
    assert policy.optimizer_step().samples == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(bad: float) -> None:
    policy = make_policy()
    policy.accumulate(make_samples(7))
    before = parameters(policy)
    gradients = [parameter.grad for parameter in policy.model.parameters()]
    assert gradients[-1] is not None
    gradients[-1].view(-1)[0] = bad
    for _ in range(2):
        with pytest.raises(NonFiniteGradient, match=r"solver.*version 0"):
            policy.optimizer_step()
    assert torch.equal(parameters(policy), before)
    assert policy.version == 0
    assert not any(state["step"].item() for state in policy._optimizer.state.values())


def test_greedy_samples_can_not_be_trained_on() -> None:
    greedy = replace(make_samples(5)[0], temperature=0.0)
    with pytest.raises(ValueError, match="temperature 0"):
        make_policy().accumulate([greedy])


# --------------------------------------------------------------------------- the optimizer step


def test_steps_equal_plain_torch_with_every_row_computed() -> None:
    """Three steps against torch's own clipping and AdamW on the mean loss over all tokens, none skipped."""
    policy, plain = make_policy(), make_policy()
    named = list(plain.model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in named if "norm" not in name]},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        weight_decay=OPTIMIZER.weight_decay,
    )
    for step, expected_lr in enumerate((1e-3 / 3, 2e-3 / 3, 1e-3)):
        samples = make_samples(step, version=step)
        policy.accumulate(samples[::2])
        policy.accumulate(samples[1::2])
        stats = policy.optimizer_step()

        optimizer.zero_grad()
        torch.autograd.backward(reference_loss(plain, samples) / sum(len(s.tokens) for s in samples))
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), OPTIMIZER.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = expected_lr
        optimizer.step()

        assert policy.version == step + 1
        assert stats.lr == pytest.approx(expected_lr)
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4)
        # Adam divides by the gradient's size, so rounding in tiny gradients shows at the scale of lr.
        assert float((parameters(policy) - parameters(plain)).abs().max()) < 1e-2 * expected_lr


def test_clipping_bounds_the_gradient_that_is_stepped_with(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    for parameter in policy.model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(1.0)
    seen: list[float] = []
    real_step = policy._optimizer.step

    def record_and_step() -> None:
        seen.append(float(gradient(policy).norm()))
        real_step()

    monkeypatch.setattr(policy._optimizer, "step", record_and_step)
    stats = policy.optimizer_step()
    assert stats.grad_norm == pytest.approx(math.sqrt(gradient(policy).numel()), rel=1e-5)
    assert seen == pytest.approx([OPTIMIZER.max_grad_norm], rel=1e-4)


def trained_once(**optimizer: Any) -> TorchPolicy:
    """A policy with momentum, at version 1."""
    policy = make_policy(optimizer=OPTIMIZER.model_copy(update=optimizer))
    policy.accumulate(make_samples(7))
    assert not policy.optimizer_step().skipped_update
    return policy


def test_a_step_without_any_advantage_leaves_the_weights_alone() -> None:
    policy = trained_once()
    before, moments = parameters(policy), moments_of(policy)
    samples = make_samples(8, groups=1, version=1)
    assert policy.accumulate(samples).trained_samples == 0
    stats = policy.optimizer_step()
    assert (policy.version, stats.grad_norm, stats.loss, stats.skipped_update) == (2, 0.0, 0.0, True)
    assert stats.tokens == sum(len(s.tokens) for s in samples)
    assert torch.equal(parameters(policy), before) and torch.equal(moments_of(policy), moments)


def test_a_zero_gradient_may_step_by_the_momentum() -> None:
    policy = trained_once(zero_gradient="step")
    before = parameters(policy)
    policy.accumulate(make_samples(8, groups=1, version=1))
    stats = policy.optimizer_step()
    assert (stats.grad_norm, stats.skipped_update) == (0.0, False)
    assert float((parameters(policy) - before).abs().max()) > 0.1 * stats.lr
    assert {state["step"].item() for state in policy._optimizer.state.values()} == {2.0}


def test_a_gradient_that_is_not_finite_may_be_skipped_so_often_in_a_row() -> None:
    policy = trained_once(non_finite_gradient="skip", max_non_finite_steps=2)
    before, moments = parameters(policy), moments_of(policy)

    def broken_step() -> StepStats:
        policy.accumulate(make_samples(8, version=policy.version))
        parameter = next(policy.model.parameters())
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = math.nan
        return policy.optimizer_step()

    for _ in range(2):
        assert broken_step().skipped_update
    assert policy.version == 3
    assert torch.equal(parameters(policy), before) and torch.equal(moments_of(policy), moments)
    policy.accumulate(make_samples(9, version=3))
    assert not policy.optimizer_step().skipped_update and not torch.equal(parameters(policy), before)
    for _ in range(2):
        assert broken_step().skipped_update
    with pytest.raises(NonFiniteGradient):
        broken_step()


def test_the_schedule_follows_the_runs_steps_if_the_policy_has_fewer() -> None:
    policy = make_policy()
    rates = []
    for run_step in (0, 5, 9):
        policy.accumulate(make_samples(8, version=policy.version))
        rates.append(policy.optimizer_step(run_step).lr)
    assert policy.version == 3
    assert rates == pytest.approx([learning_rate(OPTIMIZER, step, 10) for step in (0, 5, 9)])
    assert rates[2] < 0.2 * OPTIMIZER.lr


def test_gradients_and_moments_are_allocated_once() -> None:
    policy = make_policy()

    def addresses() -> list[int]:
        tensors = [p.grad for p in policy.model.parameters() if p.grad is not None]
        tensors += [moment for state in policy._optimizer.state.values() for moment in state.values()]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    for version in range(2):
        policy.accumulate(make_samples(9, version=version))
        policy.optimizer_step()
    assert addresses() == before
    assert not gradient(policy).any()


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("constant", 1, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("linear", 2, [1 / 3, 2 / 3, 1.0, 0.5, 0.0]),
        ("linear", 4, [0.2, 0.4, 0.6, 0.8, 0.0]),
    ],
)
def test_the_learning_rate_follows_the_schedule(schedule: Any, warmup: int, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=warmup)
    assert [learning_rate(config, step, 4) for step in range(5)] == pytest.approx(expected)


# --------------------------------------------------------------------------- construction and SFT


def test_construction_depends_on_seed_and_name_alone() -> None:
    first = parameters(make_policy())
    torch.manual_seed(1234)
    torch.rand(7)
    state = torch.get_rng_state()
    assert torch.equal(parameters(make_policy()), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(parameters(make_policy(seed=1)), first)
    assert not torch.equal(parameters(make_policy(name="verifier")), first)


@pytest.mark.parametrize(
    "dropout", [{"attention_dropout": 0.3}, {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4}]
)
def test_the_models_dropout_is_off_as_in_the_engine_and_logged(dropout: dict[str, Any]) -> None:
    """GPT-2's config has a dropout of 0.1 by default."""
    state = torch.get_rng_state()
    with structlog.testing.capture_logs() as logs:
        policy = make_policy(**dropout)
    samples = make_samples(10)
    policy.accumulate(samples)
    assert torch.equal(torch.get_rng_state(), state)
    first = gradient(policy).clone()
    policy.accumulate(samples)
    assert relative_error(gradient(policy) - first, first) < 1e-5
    (event,) = [each for each in logs if each["event"].startswith("dropout")]
    assert event["policy"] == "solver" and [value for key, value in event.items() if "drop" in key]


def test_a_deviation_beyond_the_bound_is_a_warning_that_names_key_and_causes() -> None:
    policy = make_policy()
    with structlog.testing.capture_logs() as logs:
        for version in range(3):
            policy.accumulate(make_samples(4, version=version))
            assert policy.optimizer_step().ratio_deviation > 0.01
    warnings = [each for each in logs if each["log_level"] == "warning"]
    assert [each["steps"] for each in warnings] == [1, 2]
    assert warnings[0]["bound_is"] == "policies.solver.algorithm.ratio_deviation_warning"
    assert "weights" in warnings[0]["likely_causes"] and warnings[0]["bound"] == 0.01


def test_the_bound_of_the_deviation_fits_the_dtype_unless_it_is_given() -> None:
    assert LossConfig().deviation_bound("float32") < LossConfig().deviation_bound("bfloat16")
    assert LossConfig(ratio_deviation_warning=0.5).deviation_bound("float32") == 0.5


def test_rows_behind_the_switch_of_longrope_are_refused() -> None:
    rope = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_type": "longrope", "rope_theta": 1e4}
    policy = make_policy(
        model_type="phi3", pad_token_id=None, eos_token_id=None, bos_token_id=None, head_dim=16,
        original_max_position_embeddings=24, rope_parameters=rope | {"original_max_position_embeddings": 24},
    )  # fmt: skip
    policy.accumulate(make_samples(2))
    long = replace_tokens(make_samples(2)[0], (1,) * 30)
    with pytest.raises(ValueError, match="rotations .longrope. change behind 24"):
        policy.accumulate([long])


def test_tied_weights_are_published_once() -> None:
    tied, untied = make_policy(tie_word_embeddings=True), make_policy()
    assert set(untied.weights()) - set(tied.weights()) == {"lm_head.weight"}
    assert not any(tensor.requires_grad for tensor in tied.weights().values())


def test_bfloat16_computes_and_publishes_in_bfloat16_on_float32_master_weights() -> None:
    config = ModelConfig(config=MODEL, tokenizer="unused", dtype="bfloat16")
    full = make_policy()
    half = TorchPolicy(
        PolicyName("solver"),
        PolicySetup(
            model=config,
            credit={AgentName("solver"): CreditConfig()},
            loss=LossConfig(name="dapo"),
            optimizer=OPTIMIZER,
        ),
        seed=0,
        total_steps=10,
    )
    for policy in (full, half):
        policy.accumulate(make_samples(11))
    assert {tensor.dtype for tensor in half.weights().values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}
    assert 1e-4 < relative_error(gradient(half), gradient(full)) < 0.2
    half.optimizer_step()
    assert half.version == 1


EXAMPLES = [((index % 10, 11), (index % 10, 12, 13)) for index in range(32)]


def test_sft_reduces_the_loss_and_leaves_fresh_moments() -> None:
    policy = make_policy()
    losses = [policy.sft(EXAMPLES) for _ in range(20)]
    assert losses[0] == pytest.approx(math.log(16), abs=0.5)
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(RuntimeError, match="sft_done"):
        policy.accumulate(make_samples(12))
    with structlog.testing.capture_logs() as logs:
        policy.sft_done()
    assert [(entry["batches"], entry["loss"]) for entry in logs] == [(20, losses[-1])]
    assert policy.version == 0
    assert not any(tensor.any() for state in policy._optimizer.state.values() for tensor in state.values())
    assert not gradient(policy).any()
    assert policy.accumulate(make_samples(12)).trained_samples > 0


def test_the_sft_loss_is_the_mean_over_completion_tokens() -> None:
    policy, plain = make_policy(), make_policy()
    examples = [((1, 2, 3), (4,)), ((5,), (6, 7, 8))]
    losses = []
    for prompt, completion in examples:
        logits = plain.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="sum"))
    assert policy.sft(examples) == pytest.approx(sum(loss.item() for loss in losses) / 4, rel=1e-5)


def test_sft_after_reinforcement_learning_has_begun_is_refused() -> None:
    policy = make_policy()
    policy.accumulate(make_samples(13))
    with pytest.raises(RuntimeError, match="solver"):
        policy.sft(EXAMPLES)
