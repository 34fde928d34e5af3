"""Processes that form gangs of any size, one after the other, and what they compute there.

The functions of a gang run in those processes: arguments and results are pickled.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import peft  # noqa: F401  # for the forks, each of which would import it
import psutil
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import LoraConfig, ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig
from flexmarl.actors.trainer.backends.policy_backend import TrainingStep
from flexmarl.actors.trainer.backends.torch_policy import completion_model
from flexmarl.actors.trainer.backends.torch_policy.gang_meeting import LOOPBACK, Meeting, Membership
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import GangRank
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.shards import Shard, pieces
from flexmarl.actors.trainer.trainer_config import LossConfig, OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.launch.bench.namespaces import Host, enter

from .....patience import PATIENCE_S
from ...forks import SERVER
from .policies import SMALLER_MODEL

NAME = PolicyName("solver")
SEED = 3
RECIPE = Path(__file__).parents[4] / "launch" / "recipes" / "tiny"


def gang_setup(
    algorithm: dict[str, Any],
    *,
    dtype: str = "float32",
    trainer: Any = None,
    lora: LoraConfig | None = None,
    publishes_adapter: bool = False,
    updates: int = 1,
    **model: Any,
) -> PolicySetup:
    """A vocabulary of 18: neither two nor four ranks divide it, and a critic's head has one row."""
    return PolicySetup(
        model=ModelConfig(config=SMALLER_MODEL | {"vocab_size": 18} | model, tokenizer="unused", dtype=dtype),
        credit={AgentName("solver"): CreditConfig(name=algorithm["name"])},
        loss=LossConfig(**algorithm),
        optimizer=OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), schedule="linear", weight_decay=0.01),
        lora=lora,
        publishes_adapter=publishes_adapter,
        updates=updates,
        **({"trainer": trainer} if trainer else {}),
    )


# --------------------------------------------------------------------------- processes


HERE: Final = Host("here", LOOPBACK)


_memberships: list[Membership] = []
"""The membership of this process in the gang of the call under way."""


def abort_gang() -> None:
    """Ends the gang's collective calls, as a slot worker does when its part of them has failed."""
    _memberships[-1].abort()


def _serve(connection: Connection, host: Host) -> None:
    enter(host)
    torch.set_num_threads(1)
    while (call := connection.recv()) is not None:
        function, rank, size, replicas, meeting, arguments = call
        device = torch.device("cpu")
        membership = Membership(rank, size, meeting, device, PATIENCE_S, replicas=replicas)
        _memberships[:] = [membership]
        try:
            connection.send((function(membership.join(), *arguments), None))
        except Exception:  # noqa: BLE001  # the test shows it
            connection.send((None, traceback.format_exc()))
        finally:
            membership.leave()
    connection.send(None)


class Ranks:
    """``most`` processes, each of which is a rank of one gang at a time. They are dealt to ``hosts``; the first ones
    of all gangs are on the first."""

    def __init__(self, most: int, hosts: Sequence[Host] = (HERE,)) -> None:
        self._host = hosts[0]
        self._processes: list[psutil.Process] = []
        self._connections: list[Connection] = []
        for rank in range(most):
            process, connection = SERVER.fork(_serve, hosts[rank % len(hosts)])
            self._processes.append(process)
            self._connections.append(connection)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, replicas: int = 1) -> list[Any]:
        """The results of ``function(gang, *arguments)`` by rank. The gang ends with the call."""
        with ThreadPoolExecutor(1, initializer=enter, initargs=(self._host,)) as thread:
            meeting = thread.submit(Meeting, self._host.address).result(PATIENCE_S)
        for rank in range(size):
            self._connections[rank].send((function, rank, size, replicas, meeting.address, arguments))
        results = self._results(size)
        meeting.close()
        return results

    def run_alone(self, function: Callable[..., Any], *arguments: tuple[Any, ...]) -> list[Any]:
        """The results of ``function(ALONE, *arguments[i])``, each in a process of its own."""
        for connection, arguments_of_one in zip(self._connections, arguments, strict=False):
            connection.send((function, 0, 1, 1, "", arguments_of_one))
        return self._results(len(arguments))

    def _results(self, size: int) -> list[Any]:
        results = [self._result(rank) for rank in range(size)]
        errors = [error for _, error in results if error]
        assert not errors, "\n".join(errors)
        return [result for result, _ in results]

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_running():
                connection.send(None)
                assert connection.poll(PATIENCE_S) and connection.recv() is None
                process.wait(PATIENCE_S)
            connection.close()

    def _result(self, rank: int) -> tuple[Any, str | None]:
        """Its answer and None, None and an error, or None twice if its process has ended."""
        assert self._connections[rank].poll(PATIENCE_S), "a rank does not answer"
        try:
            result: tuple[Any, str | None] = self._connections[rank].recv()
        except EOFError:
            self._processes[rank].wait(PATIENCE_S)
            return None, None
        return result


def is_cut(problem: str) -> bool:
    """True if a rank's collective has ended with a connection to another one."""
    return any(words in problem for words in ("Connection closed by peer", "Connection reset", "Broken pipe"))


# --------------------------------------------------------------------------- what ranks compute


@contextmanager
def double_precision() -> Iterator[None]:
    """Models built within it are in float64, so that only the order of sums is left to differ."""
    with mock.patch.object(completion_model, "MASTER_DTYPE", torch.float64):
        yield


def array(tensor: torch.Tensor) -> NDArray[Any]:
    """A copy."""
    return np.array(tensor.numpy())


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank's whole state, as it would travel."""

    tensors: dict[str, NDArray[Any]]
    parts: dict[str, Shard]
    data: dict[str, Any]


def state_of(policy: TorchPolicy) -> RankState:
    step = policy.step_state()
    tensors = {**policy.base_state(), **step.tensors}
    parts = policy.parts()
    arrays = {name: array(tensor) for name, tensor in tensors.items()}
    assert all(arrays[name].shape == parts[name].own_shape for name in arrays)
    return RankState(arrays, {name: parts[name] for name in arrays}, step.data)


def load_state(policy: TorchPolicy, states: Sequence[RankState], most_bytes: int = 256) -> None:
    """Copies this rank's rows of the state of another gang, piece by piece; the gangs may differ in size."""
    live: Mapping[str, torch.Tensor] = policy.base_state()
    gradients = {
        name: torch.empty_like(tensor)
        for name, tensor in policy.models.gradients().items()
        if name in states[0].tensors
    }
    own = {**live, **gradients}
    assert own.keys() == states[0].tensors.keys()
    parts = {name: part for name, part in policy.parts().items() if name in own}
    row_bytes = {
        name: int(np.prod(part.shape[1:])) * own[name].element_size() for name, part in parts.items()
    }
    for piece in pieces(parts, [state.parts for state in states], row_bytes, most_bytes):
        source = torch.from_numpy(np.atleast_1d(states[piece.source].tensors[piece.name]))
        destination = own[piece.name] if own[piece.name].dim() else own[piece.name].view(1)
        rows = source[piece.source_start : piece.source_start + piece.rows]
        destination[piece.own_start : piece.own_start + piece.rows] = rows
    policy.load_state(TrainingStep(gradients, states[0].data))


def factory_of(setup: PolicySetup) -> TorchFactory:
    """Makes policies with ``setup``, which may have a loss of a user's own."""
    recipe = None if setup.loss.loss is None else Recipe(RecipeConfig(folder=str(RECIPE), data={}, seed=SEED))
    return TorchFactory(SEED, 10, recipe=recipe)


def made_policy(gang: GangRank, setup: PolicySetup, states: Sequence[RankState] | None) -> TorchPolicy:
    factory = factory_of(setup)
    if states is None:
        return factory.build(NAME, setup, gang)
    policy = factory.host(NAME, setup, gang)
    load_state(policy, states)
    return policy


def published(policy: TorchPolicy) -> dict[str, torch.Tensor]:
    """The weights to publish, on the first rank of its gang; nothing on the others."""
    into = {name: torch.empty_like(tensor, device="cpu") for name, tensor in policy.weights_outline().items()}
    policy.gather_weights(into)
    return into


def whole_gradients(policy: TorchPolicy) -> dict[str, NDArray[Any]]:
    """The gradients of all ranks together."""
    models = {"gradient": policy.model}
    if policy._critic is not None:
        models["critic_gradient"] = policy._critic.model
    found = {}
    for kind, model in models.items():
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                assert not parameter.requires_grad, name
                continue
            whole: Any = parameter.grad
            found[f"{kind}/{name}"] = array(whole.full_tensor() if isinstance(whole, DTensor) else whole)
    return found


Call = tuple[str, Any]
"""``accumulate`` with samples, ``sft`` with examples, ``sft_done`` or ``step`` with None."""

STEP: Call = ("step", None)


def called(policy: TorchPolicy, calls: Sequence[Call]) -> list[Any]:
    results: list[Any] = []
    for name, argument in calls:
        match name:
            case "accumulate":
                stats = policy.accumulate(argument)
                results.append((stats.samples, stats.tokens, stats.trained_samples))
            case "sft":
                results.append(policy.sft(argument))
            case "sft_done":
                policy.sft_done()
            case "step":
                results.append(policy.optimizer_step())
    return results


@dataclass(frozen=True, slots=True)
class Trained:
    """``gradients``: accumulated since the last step, or before the last call if that is a step."""

    results: list[Any]
    gradients: dict[str, NDArray[Any]]
    weights: dict[str, NDArray[Any]]
    state: RankState


def train(
    gang: GangRank, setup: PolicySetup, calls: Sequence[Call], states: Sequence[RankState] | None = None
) -> Trained:
    """In double precision: from the initial weights, or from the ``states`` of another gang."""
    with double_precision():
        return train_as_configured(gang, setup, calls, states)


def train_as_configured(
    gang: GangRank, setup: PolicySetup, calls: Sequence[Call], states: Sequence[RankState] | None = None
) -> Trained:
    policy = made_policy(gang, setup, states)
    results = called(policy, calls[:-1])
    gradients = whole_gradients(policy)
    results += called(policy, calls[-1:])
    if not calls or calls[-1] != STEP:
        gradients = whole_gradients(policy)
    weights = {name: array(tensor.double()) for name, tensor in published(policy).items()}
    return Trained(results, gradients, weights, state_of(policy))


def compare(gang: GangRank, setup: PolicySetup, samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The differences of this rank's samples, in two micro-batches."""
    policy = made_policy(gang, setup, None)
    policy.accumulate(samples[:5])
    policy.accumulate(samples[5:])
    return {name: compared.differences.tolist() for name, compared in policy.take_compared().items()}


def train_in_chunks(gang: GangRank, setup: PolicySetup, calls: Sequence[Call]) -> Trained:
    """With the logits of two tokens in memory at a time."""
    with mock.patch.object(completion_model, "most_logits_bytes", lambda _device: 2 * 4 * 18):
        return train_as_configured(gang, setup, calls)
