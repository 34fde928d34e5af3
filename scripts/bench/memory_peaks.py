"""The most memory of tensors that each rank of a policy has at a time, in the phases of a training step."""

import asyncio
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch.autograd import profiler

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, StateBytes
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.pretrained import seeded_model
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.policy_backend import TrainingStep
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import GangRank
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.padding import pad_rows
from flexmarl.actors.trainer.trainer_config import LossConfig, OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.launch.bench.namespaces import Host
from flexmarl.transport.handle import TensorSpec
from flexmarl.transport.state import StateTransport, payload_bytes

from .gang_processes import HERE, RANK_S, GangProcess
from .gathered_weights import GatheredWeights
from .settled_collectives import one_thread, settled_collectives

_POLICY: Final = PolicyName("policy")
_SEED: Final = 3


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """Bytes by rank, of all tensors of the process. ``draw``: the build from a config alone, ``build``: from a folder.

    ``shares``: the largest part of the model that a rank has beyond its own rows, by phase: in ``forward``, with its
    backward, the weights that are gathered, by their number; else all memory beyond the state, as a share of the whole
    in the type that the phase works with (float32; bfloat16 in ``publish``). ``state_bytes``: the parts of a suspended
    state.
    """

    parameters: int
    draw_peak_bytes: list[int]
    build_peak_bytes: list[int]
    resume_peak_bytes: list[int]
    forward_peak_bytes: list[int]
    publish_peak_bytes: list[int]
    shares: dict[str, float]
    state_bytes: list[StateBytes]


@dataclass(frozen=True, slots=True)
class _RankPeaks:
    parameters: int
    peaks: dict[str, int]
    shares: dict[str, float]
    state: StateBytes


def measure_memory(
    gangs: GangProcess,
    config: dict[str, Any],
    ranks: int,
    tokens: int,
    hosts: Sequence[Host] = (HERE,),
    replicas: int = 1,
) -> MemoryPeaks:
    """Measures a policy in bfloat16 over float32 weights on ``ranks`` processes of the CPU, which recompute layers.

    ``config``: of the model. ``tokens``: of the one row in the forward, all but one of its answer. ``hosts`` and
    ``replicas``: each has equally many ranks. Raises RuntimeError with the traceback of a rank that has failed.
    """
    with TemporaryDirectory(prefix="flexmarl-memory-") as folder:
        seeded_model(ModelConfig(config=config, tokenizer="unused"), _SEED, torch.bfloat16).save_pretrained(
            folder
        )
        results: list[_RankPeaks] = gangs.compute(
            _measure_rank,
            config,
            tokens,
            Path(folder),
            ranks=ranks,
            hosts=hosts,
            replicas=replicas,
            joining=one_thread,
        )
    peaks = {f"{phase}_peak_bytes": [result.peaks[phase] for result in results] for phase in results[0].peaks}
    shares = {phase: max(result.shares[phase] for result in results) for phase in results[0].shares}
    return MemoryPeaks(
        parameters=results[0].parameters,
        shares=shares,
        state_bytes=[result.state for result in results[: ranks // replicas]],
        **peaks,
    )


class TensorMemory:
    """Counts the memory of all tensors of this process, on the CPU. They have to be made and dropped within phases, by
    the thread that computes them: nothing else is counted. ``settles``: collectives of gloo are, see
    ``settled_collectives``."""

    def __init__(self, *, settles: bool = False) -> None:
        self.live_bytes = 0
        self._settles = settles

    def peak_in(self, compute: Callable[[], object]) -> int:
        """The most bytes at a time in a phase, while ``compute`` runs; with those that it begins with."""
        with (
            settled_collectives() if self._settles else nullcontext(),
            profiler.profile(profile_memory=True, use_kineto=True) as profile,
        ):
            compute()
        assert profile.kineto_results is not None
        events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
        peak = self.live_bytes
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.live_bytes += event.nbytes()
            peak = max(peak, self.live_bytes)
        return peak


def peak_bytes(compute: Callable[[], object]) -> int:
    """The most bytes of tensors that were allocated at a time, beyond those at the begin."""
    return TensorMemory().peak_in(compute)


def _measure_rank(gang: GangRank, config: dict[str, Any], tokens: int, folder: Path) -> _RankPeaks:
    random = _setup_of(ModelConfig(config=config, tokenizer="unused", dtype="bfloat16"))
    saved = _setup_of(ModelConfig(path=str(folder), tokenizer="unused", dtype="bfloat16"))
    policies: list[TorchPolicy] = []
    memory = TensorMemory(settles=True)

    def build(setup: PolicySetup) -> None:
        policies.append(TorchFactory(_SEED, 10).build(_POLICY, setup, gang))

    def drop() -> None:
        policies.clear()
        gc.collect()

    peaks = {"draw": memory.peak_in(lambda: build(random))}
    memory.peak_in(drop)
    peaks["build"] = memory.peak_in(lambda: build(saved))
    trained = _measure_training(policies[0], tokens, memory, partial(_publish, gang, folder))
    base = {name: tensor.to("meta") for name, tensor in policies[0].base_state().items()}
    data = policies[0].step_state().data
    memory.peak_in(drop)
    peaks["resume"] = memory.peak_in(lambda: _resume(saved, base, data, gang))
    live = trained.state.base + trained.state.step
    shares = {phase: (peak - live) / (4 * trained.parameters) for phase, peak in peaks.items()}
    return _RankPeaks(trained.parameters, peaks | trained.peaks, shares | trained.shares, trained.state)


def _measure_training(
    policy: TorchPolicy, tokens: int, memory: TensorMemory, publish: Callable[[TorchPolicy], object]
) -> _RankPeaks:
    parameters = sum(
        math.prod(part.shape) for name, part in policy.parts().items() if name.startswith("model/")
    )
    memory.peak_in(lambda: _train(policy, tokens))  # what FSDP2 allocates once
    live = memory.live_bytes
    peaks = {
        "forward": memory.peak_in(lambda: _train(policy, tokens)),
        "publish": memory.peak_in(lambda: publish(policy)),
    }
    # Counted apart: the peak has activations and gradients too, and these do not belong to the model.
    gathered = GatheredWeights(policy.models.completions._forward)
    with gathered.counted():
        memory.peak_in(lambda: _train(policy, tokens))
    shares = {
        "forward": gathered.most / parameters,
        "publish": (peaks["publish"] - live) / (2 * parameters),
    }
    states: list[StateBytes] = []
    memory.peak_in(lambda: states.append(_state_bytes(policy)))
    return _RankPeaks(parameters, peaks, shares, states[0])


def _publish(gang: GangRank, folder: Path, policy: TorchPolicy) -> None:
    """As a slot worker: the first rank opens the memory that instances read, and all of them gather the weights."""

    async def gather(into: Mapping[str, Any]) -> None:
        policy.gather_weights(into)

    async def fill() -> None:
        async with StateTransport(folder) as transport:
            await transport.fill(_POLICY, policy.weights_outline(), gather, version=1, timeout_s=RANK_S)

    if gang.rank:
        policy.gather_weights({})
    else:
        asyncio.run(fill())


def _resume(setup: PolicySetup, base: dict[str, torch.Tensor], data: dict[str, Any], gang: GangRank) -> None:
    """As a slot worker: the state is read into memory that the models then take over. ``base``: its outline."""
    specs = [
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), 0)
        for name, tensor in base.items()
    ]
    factory = TorchFactory(_SEED, 10)
    policy = factory.host(_POLICY, setup, gang, factory.memory(_POLICY, setup, specs))
    policy.load_state(TrainingStep({}, data))


def _train(policy: TorchPolicy, tokens: int) -> None:
    rows = pad_rows([((1,), (2,) * tokens)], policy.models.completions.vocab_size)
    for forward in policy.models.replica_sums.of_micro_batch([rows], 1):
        torch.autograd.backward(policy.models.completions.logprobs(forward).sum())


def _setup_of(model: ModelConfig) -> PolicySetup:
    return PolicySetup(
        model=model,
        credit={AgentName("agent"): CreditConfig(name="grpo")},
        loss=LossConfig(name="grpo"),
        optimizer=OptimizerConfig(),
        trainer=TorchTrainerConfig(activation_checkpointing=True),
    )


def _state_bytes(policy: TorchPolicy) -> StateBytes:
    base, step = payload_bytes(policy.base_state()), payload_bytes(policy.gradients())
    return StateBytes(
        weights=payload_bytes(policy.weights_outline()),
        rest=base,
        step=step,
        base=base,
        on_slot=base + step,
        rows={},
        live={},
    )
