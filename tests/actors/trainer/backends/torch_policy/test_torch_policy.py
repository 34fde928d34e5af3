"""One policy on one rank: the gradient, its construction, and samples that are refused."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import NonFiniteGradient, StaleSample, TooManyTokens
from flexmarl.actors.messages import ModelConfig, Sample, Truncation
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.policy_backend import PolicyBackend
from flexmarl.actors.trainer.backends.torch_policy import completion_model, forward_batches
from flexmarl.actors.trainer.backends.torch_policy.device_copy import copy_together, pack, unpack
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_config import LossConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.actors.truncated_scores import Truncations

from .policies import (
    MODEL,
    OPTIMIZER,
    gradient,
    make_policy,
    make_samples,
    parameters,
    reference_loss,
    relative_error,
    replace_tokens,
)


def test_is_a_policy_backend() -> None:
    backend: PolicyBackend = make_policy()
    assert backend.version == 0


# --------------------------------------------------------------------------- the gradient


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@settings(max_examples=12)
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
    assert stats.figures["clip_fraction"] == 0.0
    assert stats.figures["ratio_deviation"] < 1e-5


def drawn_under(policy: TorchPolicy, sample: Sample, cut: Truncation | None) -> Sample:
    """The sample with tokens that ``cut`` leaves, and their log-probabilities."""
    tokens, logprobs = list[int](), list[float]()
    for token in sample.tokens:
        with torch.no_grad():
            scores = policy.model(input_ids=torch.tensor([[*sample.prompt_tokens, *tokens]])).logits[0, -1:]
        if cut is not None:
            scores = Truncations.of([cut], scores.device).masked(scores)
        (every,) = scores.log_softmax(-1)
        tokens.append(token if every[token].isfinite() else int(every.isfinite().nonzero()[-1]))
        logprobs.append(float(every[tokens[-1]]))
    return replace(sample, tokens=tuple(tokens), logprobs=tuple(logprobs), truncation=cut)


def test_truncated_samples_are_trained_under_the_distribution_that_they_were_drawn_from() -> None:
    cuts = itertools.cycle([Truncation(top_k=9), None, Truncation(top_p=0.9), Truncation(min_p=0.3)])
    samples = [drawn_under(make_policy(), sample, next(cuts)) for sample in make_samples(3)]
    policy = make_policy()
    policy.accumulate(samples)
    stats = policy.optimizer_step()
    assert stats.figures["ratio_deviation"] < 1e-5 and stats.figures["unsure_tokens"] == 0
    policy = make_policy()
    policy.accumulate([replace(sample, truncation=None) for sample in samples])
    assert policy.optimizer_step().figures["ratio_deviation"] > 1e-2, "without it the two differ"


def test_tokens_outside_of_the_support_are_counted() -> None:
    policy = make_policy()
    samples = [drawn_under(policy, sample, Truncation(top_k=2)) for sample in make_samples(3)]
    narrower = [replace(sample, truncation=Truncation(top_k=1)) for sample in samples]
    first = sum(logprob < -math.log(2) for sample in samples for logprob in sample.logprobs)
    trained = sum(len(s.tokens) for s in samples if s.advantage)
    policy.accumulate(narrower)
    stats = policy.optimizer_step()
    assert 0 < stats.figures["unsure_tokens"] <= first < sum(len(sample.tokens) for sample in samples)
    assert stats.figures["unsure_tokens"] < trained and math.isfinite(stats.figures["loss"])


def copy_as_to_a_gpu(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return unpack(pack(tensors, pinned=False).to(device), tensors)


def test_truncated_samples_train_from_one_copy_of_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several forwards of a micro-batch, several chunks of the head in each, as on a GPU: whether a token is sure is
    written to the copy, after the checkpoints have kept other tensors of it."""
    monkeypatch.setattr(completion_model, "most_logits_bytes", lambda _device: 4 * 16 * 5)
    trainer = TorchTrainerConfig(tokens_per_forward=30, activation_checkpointing=True)
    samples = [drawn_under(make_policy(), sample, Truncation(top_p=0.9)) for sample in make_samples(3)]
    gradients = []
    for copy in (copy_together, copy_as_to_a_gpu):
        monkeypatch.setattr(forward_batches, "copy_together", copy)
        policy = make_policy(trainer=trainer)
        policy.accumulate(samples)
        policy.optimizer_step()
        policy.accumulate([replace(sample, policy_version=1) for sample in samples])
        gradients.append(gradient(policy))
        assert policy.optimizer_step().figures["unsure_tokens"] < 5
    assert torch.equal(*gradients)


def test_stats_count_all_tokens_and_the_trained_ones() -> None:
    samples = make_samples(4)
    samples[0] = replace(samples[0], logprobs=(-9.0,) * len(samples[0].tokens))  # beyond the weight's bound
    advantages = [s.advantage for s in samples]
    assert 0.0 in advantages
    policy = make_policy()
    stats = policy.accumulate(samples)
    assert stats.samples == len(samples)
    assert stats.tokens == sum(len(s.tokens) for s in samples)
    assert stats.trained_samples == sum(map(bool, advantages))
    assert stats.seconds > 0.0
    step = policy.optimizer_step()
    assert (step.samples, step.tokens) == (stats.samples, stats.tokens)
    assert 0.0 < step.figures["clip_fraction"] < 1.0


def test_loss_and_ratio_deviation_are_those_of_the_plain_computation() -> None:
    samples = make_samples(4)
    policy, plain = make_policy(), make_policy()
    ratios, surprisals = [], []
    for sample in samples:
        if sample.advantage:
            row = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
            with torch.no_grad():
                logprobs = plain.model(input_ids=row).logits[0].log_softmax(-1)
            start = len(sample.prompt_tokens) - 1
            surprisals += [-float(logprobs[start + i, token]) for i, token in enumerate(sample.tokens)]
            ratios += [
                math.exp(float(logprobs[start + i, token]) - sample.logprobs[i])
                for i, token in enumerate(sample.tokens)
            ]
    policy.accumulate(samples[:5])
    policy.accumulate(samples[5:])
    stats = policy.optimizer_step()
    assert 0 < len(ratios) < stats.tokens
    assert stats.figures["loss"] == pytest.approx(
        reference_loss(plain, samples).item() / stats.tokens, rel=1e-4
    )
    assert stats.figures["ratio_deviation"] == pytest.approx(
        fmean(abs(ratio - 1) for ratio in ratios), rel=1e-4
    )
    assert stats.figures["entropy"] == pytest.approx(fmean(surprisals), rel=1e-4)
    advantages = [sample.advantage for sample in samples for _ in sample.tokens]
    assert stats.figures["advantage_mean"] == pytest.approx(fmean(advantages), abs=1e-6)
    assert stats.figures["advantage_std"] == pytest.approx(pstdev(advantages), rel=1e-4)
    assert "kl" not in stats.figures, "there is no reference"


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
            assert policy.optimizer_step().figures["ratio_deviation"] > 0.01
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


def test_a_device_without_memory_names_the_settings_that_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(trainer=TorchTrainerConfig(tokens_per_forward=77))

    def fail(*_args: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 980.00 MiB")

    monkeypatch.setattr(policy.models.completions, "logprobs", fail)
    with pytest.raises(
        TooManyTokens, match=r"policy solver: .*tokens_per_forward=77, .*\. CUDA out of memory"
    ):
        policy.accumulate(make_samples(0))
