"""A mixture of experts in bf16 trains in the memory of its plan, and its engine is as near to it as its bounds say.

A router chooses experts by scores that bf16 rounds: of two that are nearly alike, engine and trainer may take different
ones. With random weights scores are more alike than those of a trained model, so that this is a bad case. Criteria: the
peak of a forward and its backward is at most 1.1 times the plan's; the mean of ``|ratio - 1|`` is within
``ratio_deviation_warning`` and 1.5 times that of the trainer beside float32; no answer to the probes of 16 versions
differs by more than ``weights.probe_bound``. Recorded: the bytes, the rate, and the distribution of the differences.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Final

from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig
from flexmarl.actors.inference.weights_proof import CHOICE_BOUND, least_difference, other_choices
from flexmarl.actors.model_shape import shape_of
from flexmarl.actors.model_sources import architecture_of
from flexmarl.actors.names import PolicyName
from flexmarl.actors.pretrained import named_weights_of
from flexmarl.actors.trainer.backends.torch_policy.compiled import is_compiled
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.backends.torch_policy.weights_probe import weights_probe
from flexmarl.actors.trainer.rank_bytes import RankBytes, RankLoad, logits_limit, rank_bytes
from flexmarl.actors.trainer.trainer_config import LossConfig
from scripts.bench.memory_peaks import peak_bytes as peak_of_tensors

from .checks import Card, Check, at_most, part
from .engine_agreement import Load as Requests
from .engine_agreement import compare, engine_of, sharpen
from .filled_policies import filled_policy
from .models import MIXTURE, TINY_MIXTURE, Dtype, Mixture, make_samples, model_of, setup_of
from .timing import free_memory, live_bytes, peak_bytes, seconds_of
from .trainer_speed import Load

_DTYPE: Final[Dtype] = "bfloat16"
_MOST_OVER_PLAN: Final = 1.1
_VERSIONS: Final = 16
CARD_LOAD: Final = Load(16, 256, 768, 8192)
CPU_LOAD: Final = Load(8, 16, 112, 1024)
CARD_REQUESTS: Final = Requests(32, 256, 256, (16,), 64)
CPU_REQUESTS: Final = Requests(4, 8, 16, (4,), 8)


def run(card: Card) -> Iterator[Check]:
    shape, load = (MIXTURE, CARD_LOAD) if card.is_cuda else (TINY_MIXTURE, CPU_LOAD)
    requests = CARD_REQUESTS if card.is_cuda else CPU_REQUESTS
    for checkpointing in (False, True):
        yield from part("memory", partial(measure_memory, card, shape, load, checkpointing=checkpointing))
        free_memory(card.device)
    yield from part("probes", partial(compare_probes, card, shape, requests))
    free_memory(card.device)
    most = LossConfig().deviation_bound(_DTYPE)
    yield from part("numbers", partial(compare, card, shape, requests, _DTYPE, most))


def measure_memory(card: Card, shape: Mixture, load: Load, *, checkpointing: bool) -> Iterator[Check]:
    """The peak of a micro-batch beside the plan's, and its rate."""
    name = "checkpointing" if checkpointing else "all activations"
    setup = setup_of(
        shape, card.device, _DTYPE, tokens_per_forward=load.tokens_per_forward, checkpointing=checkpointing
    )
    policy = filled_policy(setup)
    samples = make_samples(load.count, load.prompt, load.completion, shape.vocabulary)
    policy.accumulate(samples)  # compiles, and what libraries allocate once
    policy.optimizer_step()
    samples = [replace(sample, policy_version=policy.version) for sample in samples]
    planned = _plan(card, policy, shape, load, checkpointing=checkpointing)
    beyond = _beyond_state(card, partial(policy.accumulate, samples))
    peak = planned.state + beyond
    yield Check(f"{name}: peak", peak, "bytes")
    yield Check(f"{name}: beyond the state", beyond, "bytes")
    yield Check(f"{name}: beyond the state, over the plan's", beyond / (planned.forward - planned.state))
    yield at_most(f"{name}: peak over the plan's", peak / planned.forward, _MOST_OVER_PLAN)
    tokens = load.count * (load.prompt + load.completion)
    yield Check(f"{name}: tokens/s", tokens / seconds_of(card.device, partial(policy.accumulate, samples)))


def _plan(card: Card, policy: TorchPolicy, shape: Mixture, load: Load, *, checkpointing: bool) -> RankBytes:
    config = model_of(shape, card.device, _DTYPE)
    weights = {name: tuple(tensor.shape) for name, tensor in named_weights_of(config).items()}
    completions = policy.models.completions
    compiled = is_compiled(None, completions.model, completions.device)
    limit = logits_limit(card.total_bytes or None)
    settings = RankLoad(
        1, load.tokens_per_forward, 2, limit, has_checkpoints=checkpointing, is_compiled=compiled
    )
    return rank_bytes(shape_of(weights, architecture_of(config)), settings)


def _beyond_state(card: Card, work: Callable[[], object]) -> int:
    """The most bytes of tensors during ``work``, beside those that were there before."""
    if not card.is_cuda:
        return peak_of_tensors(work)
    before = live_bytes(card.device)
    return peak_bytes(card.device, work) - before


# ----------------------------------------------------------------------- the proof of weights


def compare_probes(card: Card, shape: Mixture, requests: Requests) -> Iterator[Check]:
    """The greatest difference of the engine's answers from the trainer's probes, as an instance finds it."""
    policy = filled_policy(setup_of(shape, card.device, _DTYPE))
    completions = policy.models.completions
    sharpen(completions, shape)
    engine = engine_of(model_of(shape, card.device, _DTYPE), completions, requests)
    differences, choices = [], []
    for version in range(_VERSIONS):
        probes = weights_probe(policy.models, PolicyName("battery"), version)
        for probe in probes:
            assert probe.routes is not None, "its routers are recorded"
            routes = probe.routes.array()
            answer = engine.replay(probe.prompt, routes)
            assert answer is not None and answer.routes is not None, "the engine has room"
            differences.append(least_difference(probe, answer.tokens[0], answer.logprobs[0]))
            choices.append(other_choices(routes, answer.routes))
    bound = EmbeddedEngineConfig().probe_bound(_DTYPE)
    assert bound is not None, "it takes the weights as they are"
    yield Check("probes: compared", len(differences))
    yield Check("probes: median difference", sorted(differences)[len(differences) // 2])
    yield at_most("probes: greatest difference (probe_max)", max(differences), bound)
    most = max(map(fmean, zip(*choices, strict=True)))
    yield at_most("probes: other choices of experts, of the layer with the most", most, CHOICE_BOUND)
