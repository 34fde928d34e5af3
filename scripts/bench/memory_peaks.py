"""The most memory of tensors that each rank of a policy has at a time, in the phases of a training step."""

import asyncio
import gc
import math
import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
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
from flexmarl.actors.trainer.backends.torch_policy.gang_meeting import LOOPBACK, Meeting, Membership
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import GangRank
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.padding import pad_rows
from flexmarl.actors.trainer.trainer_config import LossConfig, OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.launch.bench.namespaces import Host, enter
from flexmarl.transport.handle import TensorSpec
from flexmarl.transport.state import StateTransport, payload_bytes

from .gathered_weights import GatheredWeights
from .settled_collectives import one_thread, settled_collectives

HERE: Final = Host("here", LOOPBACK)

_POLICY: Final = PolicyName("policy")
_RANK_S: Final = 900.0
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
    config: dict[str, Any], ranks: int, tokens: int, hosts: Sequence[Host] = (HERE,), replicas: int = 1
) -> MemoryPeaks:
    """Measures a policy in bfloat16 over float32 weights on ``ranks`` processes of the CPU, which recompute layers.

    ``config``: of the model. ``tokens``: of the one row in the forward, all but one of its answer. ``hosts`` and
    ``replicas``: each has equally many ranks. Raises RuntimeError with the traceback of a rank that has failed.
    """
    with TemporaryDirectory(prefix="flexmarl-memory-") as folder:
        seeded_model(ModelConfig(config=config, tokenizer="unused"), _SEED, torch.bfloat16).save_pretrained(
            folder
        )
        results = _run_ranks(config, ranks, tokens, Path(folder), hosts, replicas)
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


def _run_ranks(
    config: dict[str, Any], ranks: int, tokens: int, folder: Path, hosts: Sequence[Host], replicas: int
) -> list[_RankPeaks]:
    context = multiprocessing.get_context("spawn")
    with ThreadPoolExecutor(1, initializer=enter, initargs=(hosts[0],)) as thread:
        meeting = thread.submit(Meeting, hosts[0].address).result(_RANK_S)
    connections, processes = [], []
    try:
        for rank in range(ranks):
            connection, far = context.Pipe()
            host = hosts[rank * len(hosts) // ranks]
            arguments = (far, host, rank, ranks, replicas, meeting.address, config, tokens, folder)
            process = context.Process(target=_serve_rank, args=arguments, daemon=True)
            process.start()
            far.close()
            connections.append(connection)
            processes.append(process)
        return [_result_of(connection) for connection in connections]
    finally:
        for process in processes:
            process.kill()
            process.join()
        meeting.close()


def _result_of(connection: Connection) -> _RankPeaks:
    if not connection.poll(_RANK_S):
        raise RuntimeError(f"a rank has not answered for {_RANK_S:g} s")
    result = connection.recv()
    if isinstance(result, str):
        raise RuntimeError(result)
    peaks: _RankPeaks = result
    return peaks


def _serve_rank(
    connection: Connection,
    host: Host,
    rank: int,
    size: int,
    replicas: int,
    meeting: str,
    config: dict[str, Any],
    tokens: int,
    folder: Path,
) -> None:
    enter(host)
    torch.set_num_threads(1)
    membership = Membership(rank, size, meeting, torch.device("cpu"), _RANK_S, replicas=replicas)
    try:
        with one_thread():
            gang = membership.join()
        connection.send(_measure_rank(gang, config, tokens, folder))
    except Exception:  # noqa: BLE001  # the parent raises it
        connection.send(traceback.format_exc())
    finally:
        membership.leave()


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
            await transport.fill(_POLICY, policy.weights_outline(), gather, version=1, timeout_s=_RANK_S)

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
    policy = factory.host(_POLICY, setup, gang, factory.memory(setup, specs))
    policy.load_state(TrainingStep({}, data))


def _train(policy: TorchPolicy, tokens: int) -> None:
    rows = pad_rows([((1,), (2,) * tokens)], policy.models.completions.vocab_size)
    torch.autograd.backward(policy.models.completions.logprobs(rows).sum())


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
