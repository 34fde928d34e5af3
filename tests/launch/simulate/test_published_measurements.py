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
from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.roofline import EngineLoad, TrainerLoad, engine_times, trainer_times

from .shapes import LLAMA_8B, QWEN_7B


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


def test_a_step_of_nemo_rl_with_8b_on_16_h100_is_a_third_too_short() -> None:
    """Published: 97.7 s on-policy; 2048 samples of 1060 tokens in the mean, at most 4096; four optimizer steps.
    Assumed: prompts of 160 tokens, a sigma of 0.7; log-probabilities of policy and reference take a forward each."""
    hosts = cluster(2, "H100")
    answers = lognormal(2048, 900.0, 0.7, 3936)
    generating_s = generation_s(
        engine_times(LLAMA_8B, hosts.device, EngineLoad(1, 2, 40 << 30)), answers[:128], 160
    )
    training = trainer_times(LLAMA_8B, hosts, TrainerLoad(16, 2, 16384, False))
    lengths = [160 + answer for answer in answers]
    updating_s = sum(
        training.micro_batch_s(lengths[first : first + 512], 16) for first in range(0, 2048, 512)
    )
    predicted_s = generating_s + updating_s * (1 + 2 / 3) + 4 * training.optimizer_s + training.publish_s
    assert predicted_s / 97.7 - 1 == pytest.approx(-0.33, abs=0.03)


@pytest.mark.parametrize(
    ("gpus", "log_probs_s", "published_s", "error"), [(32, 108.0, 314.0, 0.03), (64, 70.0, 133.0, 0.58)]
)
def test_updates_of_verl_with_7b_on_h20_by_the_tokens_of_its_own_log_probs(
    gpus: int, log_probs_s: float, published_s: float, error: float
) -> None:
    """Published: seconds of both phases; the number of tokens is not. A forward is a third of forward and backward, so
    that an update takes three times as long: in the second row it takes 1.9 times, which no roofline explains."""
    training = trainer_times(QWEN_7B, cluster(gpus // 8, "H20"), TrainerLoad(gpus, 2, 16384, False))

    def update_s(mean: float) -> float:
        lengths = [200 + answer for answer in lognormal(8192, mean, 0.7, 28000)]
        return sum(
            training.micro_batch_s(lengths[first : first + 512], gpus) for first in range(0, 8192, 512)
        )

    low, high = 500.0, 8000.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if update_s(middle) / 3 < log_probs_s else (low, middle)
    assert 1500.0 < low < 4000.0, "the length of answers that explains the log-probabilities is a usual one"
    assert update_s(low) / published_s - 1 == pytest.approx(error, abs=0.02)
