"""Predictions of the rooflines beside published measurements: the table of ``launch/docs/simulate.md``.

The errors are held as they are, so that a change of a device's numbers shows itself here. A publication that lacks a
number leaves it open: then it is taken from another of its own rows, or from an assumption that is named.
"""

import math
import random

import pytest

from flexmarl.actors.inference.engine_times import RooflineTimes
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.inference.engines.simulated_step_engine import SimulatedStepEngine
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.model_shape import ModelShape
from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.roofline import EngineLoad, TrainerLoad, engine_times, trainer_times

from .shapes import LLAMA_8B, LLAMA_70B, QWEN3_32B, QWEN_7B


def cluster(hosts: int, device: str) -> ClusterConfig:
    return ClusterConfig.model_validate({"hosts": hosts, "devices": 8, "device": device})


def lognormal(count: int, mean: float, sigma: float, longest: int) -> list[int]:
    draw = random.Random(1)
    median = mean * math.exp(-sigma * sigma / 2)
    return [min(longest, max(1, round(median * math.exp(sigma * draw.gauss(0, 1))))) for _ in range(count)]


def generation_s(times: RooflineTimes, answers: list[int], prompt: int) -> float:
    """Seconds in which one engine generates all of them."""
    now_s = 0.0
    config = SimulatedEngineConfig(max_batch=256, median_tokens=1e6, sigma=0.0, times=times)
    engine = SimulatedStepEngine(config, lambda: now_s)
    for number, tokens in enumerate(answers):
        engine.add(EngineRequest(str(number), (97,) * prompt, number, 1.0, tokens))
    while engine.pending:
        now_s = max(now_s, engine.due_s)
        engine.step()
    return now_s


def generating_s(times: RooflineTimes, answers: list[int], engines: int, prompt: int) -> float:
    """Seconds until the last of the engines has generated its share: the phase after it waits for all of them."""
    return max(generation_s(times, answers[number::engines], prompt) for number in range(engines))


def nemo_updates_s(shape: ModelShape, gpus: int, lengths: list[int], checkpoints: bool) -> float:
    """Four optimizer steps of 512 samples each. Pipeline stages and no sharding of weights, so that nothing is
    gathered; forwards of 4,096 tokens."""
    load = TrainerLoad(gpus, 2, 4096, checkpoints)
    times = trainer_times(shape, cluster(gpus // 8, "H100"), load).model_copy(update={"exchange_s": 0.0})
    computed_s = sum(times.micro_batch_s(lengths[first : first + 512], gpus) for first in range(0, 2048, 512))
    return computed_s + 4 * times.optimizer_s


def nemo_log_probs_s(shape: ModelShape, gpus: int, lengths: list[int]) -> float:
    """A forward each for the log-probabilities of policy and reference; forwards of 8,192 tokens."""
    load = TrainerLoad(gpus, 2, 8192, checkpoints=False)
    times = trainer_times(shape, cluster(gpus // 8, "H100"), load).model_copy(update={"exchange_s": 0.0})
    return 2 * times.micro_batch_s(lengths, gpus) / 3


def nemo_generation_s(
    shape: ModelShape, gpus: int, answers: list[int], step_s: float | None = None, devices: int = 1
) -> float:
    """``devices``: of an engine. ``step_s``: in place of the preset's."""
    device = cluster(1, "H100").device
    if step_s is not None:
        device = device.model_copy(update={"step_s": step_s})
    engine = engine_times(shape, device, EngineLoad(devices, 2, (48 << 30) - 2 * shape.parameters // devices))
    return generating_s(engine, answers, gpus // devices, 160)


NEMO_STEP_S = 6e-3
"""Seconds of an engine's step beside its reads and products with which the first of its published generations below is
predicted; the presets have 1.5 ms, typical of publications about vLLM alone."""


@pytest.mark.parametrize(
    ("shape", "gpus", "devices", "mean", "sigma", "published", "errors"),
    [
        (LLAMA_8B, 8, 1, 795, 0.7, (58, 28, 18), (-0.31, -0.00, 0.16, 0.16)),
        (LLAMA_70B, 64, 4, 412, 1.2, (84, 28, 18), (-0.19, 0.02, -0.21, -0.25)),
        (QWEN3_32B, 64, 4, 3440, 0.25, (96, 68, 40), (-0.40, -0.21, -0.09, -0.01)),
    ],
    ids=["8B", "70B", "32B"],
)
def test_phases_of_nemo_rl(
    shape: ModelShape,
    gpus: int,
    devices: int,
    mean: int,
    sigma: float,
    published: tuple[float, float, float],
    errors: tuple[float, float, float, float],
) -> None:
    """Published (NVIDIA's blog on NeMo-RL 0.3): seconds of generation, training and log-probabilities, mean lengths of
    answers; 2048 samples of at most 4096 tokens. Its recipes: no checkpointed activations, 70B with engines of four
    devices. Assumed: prompts of 160 tokens, engines of four devices for 32B, and ``mean`` and ``sigma`` with which the
    longest answers reach the limit and the mean of all is as published (797, 398 and 3282 tokens). ``errors``: of the
    generation by the presets, of that with ``NEMO_STEP_S``, of the training, of the log-probabilities."""
    answers = lognormal(2048, mean, sigma, 3936)
    assert max(answers) == 3936
    lengths = [160 + answer for answer in answers]
    generation_s, training_s, log_probs_s = published
    ratios = [
        nemo_generation_s(shape, gpus, answers, None, devices) / generation_s,
        nemo_generation_s(shape, gpus, answers, NEMO_STEP_S, devices) / generation_s,
        nemo_updates_s(shape, gpus, lengths, checkpoints=False) / training_s,
        nemo_log_probs_s(shape, gpus, lengths) / log_probs_s,
    ]
    assert [ratio - 1 for ratio in ratios] == pytest.approx(errors, abs=0.02)


@pytest.mark.parametrize(
    ("generating_gpus", "training_gpus", "mean", "published_s", "errors"),
    [(16, 16, 1060, 97.7, (-0.26, -0.08)), (8, 8, 1129, 74.6, (0.02, 0.02))],
    ids=["on-policy", "one step off"],
)
def test_steps_of_nemo_rl_with_8b_on_16_h100(
    generating_gpus: int, training_gpus: int, mean: int, published_s: float, errors: tuple[float, float]
) -> None:
    """Published (NeMo-RL 0.4): seconds, mean lengths; 2048 samples of at most 4096 tokens. Its recipe: checkpointed
    activations, a KL to a reference, 512 samples an optimizer step; one step off has a host for each of the two phases,
    which run at the same time. Assumed: prompts of 160 tokens, and a sigma of 0.7. ``errors``: by the presets, and
    with ``NEMO_STEP_S``."""
    answers = lognormal(2048, mean - 160, 0.7, 3936)
    lengths = [160 + answer for answer in answers]
    published_weights_s = 2 * LLAMA_8B.parameters / cluster(training_gpus // 8, "H100").copy_bytes_s(1)
    training_s = (
        nemo_updates_s(LLAMA_8B, training_gpus, lengths, checkpoints=True)
        + nemo_log_probs_s(LLAMA_8B, training_gpus, lengths)
        + published_weights_s
    )
    for step_s, error in zip((None, NEMO_STEP_S), errors, strict=True):
        rollout_s = nemo_generation_s(LLAMA_8B, generating_gpus, answers, step_s)
        predicted_s = max(rollout_s, training_s) if training_gpus == 8 else rollout_s + training_s
        assert predicted_s / published_s - 1 == pytest.approx(error, abs=0.03)


SENT_BYTE_S, RECEIVED_BYTE_S = 2.6e-9, 1.7e-9
"""Seconds of one process for a byte of samples that it hands to others, and of results that it takes from them:
measured by ``scripts/bench/run truth --handed`` on a core of an AMD EPYC, not by a publication."""


def handed_s(samples: int, prompt: int, answer: int, floats: int, results: int) -> float:
    """Seconds in which one process hands padded samples to all ranks: prompt, answer and its mask, and three columns of
    both, of 8 bytes each; ``floats``: columns of an answer with 4 bytes. ``results``: columns that come back."""
    columns = 8 * (prompt + 2 * answer + 3 * (prompt + answer)) + 4 * floats * answer
    return samples * (columns * SENT_BYTE_S + 4 * results * answer * RECEIVED_BYTE_S)


@pytest.mark.parametrize(
    ("gpus", "log_probs_s", "update_s", "error"),
    [(32, 107.7, 313.8, -0.13), (64, 70.3, 133.4, -0.30), (128, 53.9, 113.8, -0.29)],
)
def test_log_probs_of_verl_with_7b_on_h20(
    gpus: int, log_probs_s: float, update_s: float, error: float
) -> None:
    """Published: seconds of both phases; the number of tokens is not, and differs between the rows. Its script has
    checkpointed activations, so that an update computes four times as much as a forward, and pads 8,192 samples to
    2,048 + 28,672 tokens, all of which one process hands to the ranks of each phase. For an update they have
    log-probabilities, scores, rewards, advantages and returns too; log-probabilities come back with entropies. The
    update says how many tokens there were, and these the seconds of the forward."""
    hosts = cluster(gpus // 8, "H20")
    updates = trainer_times(QWEN_7B, hosts, TrainerLoad(gpus, 2, 16384, True))
    forwards = trainer_times(QWEN_7B, hosts, TrainerLoad(gpus, 2, 16384, False))

    def lengths(mean: float) -> list[int]:
        return [200 + answer for answer in lognormal(8192, mean, 0.9, 28000)]

    def predicted_update_s(mean: float) -> float:
        samples = lengths(mean)
        computed_s = sum(updates.micro_batch_s(samples[n : n + 512], gpus) for n in range(0, 8192, 512))
        return computed_s + handed_s(8192, 2048, 28672, floats=5, results=0)

    low, high = 100.0, 8000.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted_update_s(middle) < update_s else (low, middle)
    forward_s = forwards.micro_batch_s(lengths(low), gpus) / 3
    predicted_s = forward_s + handed_s(8192, 2048, 28672, floats=0, results=2)
    assert predicted_s / log_probs_s - 1 == pytest.approx(error, abs=0.02)
