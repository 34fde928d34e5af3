"""Policies that PyTorch trains, in one thread."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from .....transport.handle import TensorSpec
from ....chat.model_codec import model_codec
from ....chat.tokenizer_codec import TokenizerCodec
from ....errors import NoRoomForState
from ....messages import NO_GANG, GangPlace
from ....model_sources import load_tokenizer
from ....names import PolicyName
from ....recipe.named_function import named_function
from ....recipe.recipe import Recipe
from ...objective.users_loss import UsersLoss
from ...trainer_setup import PolicySetup
from ..backend_factory import BackendFactory
from ..policy_backend import PolicyBackend
from ..weights_source import WeightsSource
from .frozen_base import FrozenBases
from .frozen_source import frozen_source
from .gang_meeting import Meeting, Membership
from .gang_rank import ALONE, GangRank
from .state_memory import KeptMemories, StateMemory, new_memory
from .torch_policy import TorchPolicy
from .trained_models import TrainedModels

T = TypeVar("T")


class TorchFactory(BackendFactory):
    """Builds policies of a run. ``seed`` and ``total_steps`` are the run's. ``most_kept`` is the number of released
    policies whose memory is kept, the latest: all of them with one rank, or all of them with several. It is freed
    before a policy that does not fit takes memory of its own: a device may have room for one state alone. ``recipe``
    has the functions of users' losses; None without such losses."""

    def __init__(self, seed: int, total_steps: int, most_kept: int = 1, recipe: Recipe | None = None) -> None:
        self._seed, self._total_steps, self._most_kept = seed, total_steps, most_kept
        self._recipe = recipe
        self._released: list[TrainedModels] = []
        self._releasing = threading.Lock()
        self._kept = KeptMemories(most_kept)
        self._bases = FrozenBases(seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    def build(
        self,
        policy: PolicyName,
        setup: PolicySetup,
        gang: GangRank | None = None,
        *,
        place: GangPlace = NO_GANG,
    ) -> TorchPolicy:
        self._free_kept()
        with _named_shortage(policy):
            return TorchPolicy(
                policy,
                setup,
                seed=self._seed,
                total_steps=self._total_steps,
                gang=gang or ALONE,
                bases=self._bases,
                users_loss=self._users_loss(setup),
            )

    def _users_loss(self, setup: PolicySetup) -> UsersLoss | None:
        if (name := setup.loss.loss) is None:
            return None
        assert self._recipe is not None, "a run has a recipe"
        return UsersLoss(name, named_function(self._recipe.folder, name), self._recipe.frames)

    def frozen_weights(self, policy: PolicyName, setup: PolicySetup) -> WeightsSource:
        return frozen_source(policy, setup, self._seed)

    def memory(
        self, policy: PolicyName, setup: PolicySetup, tensors: Iterable[TensorSpec]
    ) -> dict[str, torch.Tensor]:
        specs = list(tensors)
        if (memory := self._kept.take(specs)) is None:
            self._free_kept()
            with _named_shortage(policy):
                memory = new_memory(specs, torch.device(setup.real_model.device))
        return memory.tensors

    def host(
        self,
        policy: PolicyName,
        setup: PolicySetup,
        gang: GangRank | None = None,
        memory: dict[str, torch.Tensor] | None = None,
        *,
        place: GangPlace = NO_GANG,
    ) -> TorchPolicy:
        gang = gang or ALONE
        if (models := self._take_released(setup, gang)) is not None:
            models.take_settings(setup)
        else:
            if memory is None:  # else ``memory`` has made room for it
                self._free_kept()
            with _named_shortage(policy):
                models = TrainedModels(setup, None, gang, self._bases, StateMemory(memory))
        return TorchPolicy(
            policy,
            setup,
            seed=self._seed,
            total_steps=self._total_steps,
            models=models,
            users_loss=self._users_loss(setup),
        )

    def _take_released(self, setup: PolicySetup, gang: GangRank) -> TrainedModels | None:
        """The latest released models that fit, which are not kept any more."""
        with self._releasing:
            for models in reversed(self._released):
                if models.fit(setup, gang):
                    self._released.remove(models)
                    return models
        return None

    def _free_kept(self) -> None:
        """Frees the memory that is kept. For any thread."""
        self._kept.clear()
        with self._releasing:
            has_models = bool(self._released)
            self._released.clear()
        # Not on CPUs: this takes a fifth of a second, at each turn of policies that do not fit into one another, and
        # the host's memory is not as scarce.
        if has_models and _uses_gpus():
            self.free_released()

    def release(self, backend: PolicyBackend) -> None:
        assert isinstance(backend, TorchPolicy)
        if backend.models.gang is ALONE:
            self._kept.clear()
        else:  # its process group ends, and with it the modules
            self._kept.keep(StateMemory({**backend.base_state(), **backend.gradients()}))
        with self._releasing:
            if backend.models.gang is ALONE:
                self._released.append(backend.models)
            else:
                self._released.clear()
            del self._released[: -self._most_kept or None]

    def free_released(self) -> None:
        # Modules, their forwards and hooks, and FSDP2's states refer to each other. Without this the weights of a
        # policy that has left would stay until Python happens to look at its oldest objects: for several other
        # policies, perhaps.
        gc.collect()
        if _uses_gpus():
            torch.cuda.empty_cache()  # for the other processes of the device

    def open_meeting(self, host: str) -> Meeting:
        return Meeting(host)

    def membership(self, setup: PolicySetup, place: GangPlace) -> Membership:
        device = torch.device(setup.real_model.device)
        return Membership(place.rank, place.size, place.meeting, device, replicas=place.replicas)

    def tokenizer(self, setup: PolicySetup) -> PreTrainedTokenizerBase:
        return load_tokenizer(setup.real_model)

    def codec(self, setup: PolicySetup, tokenizer: PreTrainedTokenizerBase) -> TokenizerCodec:
        return model_codec(setup.real_model, tokenizer)

    async def compute(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        # Not waiting: a computation under way can't be interrupted, and the loop has other actors to serve. The
        # process ends after it.
        self._thread.shutdown(wait=False, cancel_futures=True)


def _uses_gpus() -> bool:
    cuda: Any = torch.cuda  # without types in part
    return bool(cuda.is_initialized())


@contextmanager
def _named_shortage(policy: PolicyName) -> Iterator[None]:
    """Raises NoRoomForState in place of PyTorch's error, which names no setting."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoRoomForState(policy, str(error)) from error
