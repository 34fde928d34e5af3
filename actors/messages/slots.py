"""Messages between the trainer and its slot workers: lives, states of policies in the host's memory, computations.

A call names the life of the slot worker that it is meant for: a later life hosts nothing of what it speaks of.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol

from pydantic import Field

from ...core.actor import endpoint
from ...core.protocol.codec import Buffer
from ...transport.handle import LentMemory, StateHandle
from ..errors import (
    CheckpointIncomplete,
    CheckpointMismatch,
    NonFiniteGradient,
    RecipeError,
    SamplesUnreachable,
    StaleSample,
    WorkerReplaced,
)
from ..names import PolicyName, Step
from .experience import LeasedBatch
from .training import LikelyTokens, MicroBatchTrained, StepStats


@dataclass(frozen=True, slots=True)
class SlotLife:
    """One life of a slot worker, from its start to its end. ``incarnation``: of its system. ``torch``: its version.
    ``node``: the identity of its node (``transport/select.py``). ``side``: of its host (NUMA node), on which all its
    devices are; None if there is not one."""

    life: str
    incarnation: int
    torch: str
    node: str
    side: int | None = None


@dataclass(frozen=True, slots=True)
class GangPlace:
    """A slot's place in the gang of a policy: ``rank``, from 0, of ``size``. ``meeting``: the address at which
    the gang's processes find one another (``Meeting``); new for each binding. Empty if there is nothing to find.
    ``replicas``: of the policy; the first ranks are those of the first one, and so on."""

    rank: int
    size: int
    meeting: str
    replicas: int = 1


NO_GANG: Final = GangPlace(0, 1, "")
"""The place of a rank that computes its policy alone."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of each part of a policy's training state on one rank: see ``BaseState`` and ``HostState``. They stay the
    same. ``base``: all of the base part, live weights included. ``on_slot``: base and step part, and a frozen base.

    ``rows``: the rank's rows of each tensor of both parts, the first one and the one after the last; 0 and 1 of a
    tensor without dimensions. ``live``: the base part's name of each published weight that is the policy's own.
    """

    weights: int
    rest: int
    step: int
    base: int
    on_slot: int
    rows: dict[str, tuple[int, int]]
    live: dict[str, str]


# A policy's state without its tensors. Bytes are Buffers, whichever way they came: as bytes they would count as a part
# of the envelope at the next send.
StateData = dict[str, Annotated[Buffer | Any, Field(union_mode="left_to_right")]]


@dataclass(frozen=True, slots=True)
class BaseState:
    """The part of a training state that only an optimizer step or supervised training changes, in the host's memory.

    ``weights``: as they are published; ``weights_are_live``: they are the policy's own, not rounded copies of them.
    ``rest``: all other tensors, such as the moments. ``data``: the rest of a step that has just begun, as plain data.
    """

    weights: StateHandle
    weights_are_live: bool
    rest: StateHandle
    data: StateData


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The weights of a base part: see ``BaseState``. ``probe``: of them, see ``Published``."""

    weights: StateHandle
    probe: tuple[LikelyTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedRest:
    """The rest of a base part, and its data: see ``BaseState``."""

    rest: StateHandle
    data: StateData


@dataclass(frozen=True, slots=True)
class HostState:
    """A whole training state in the host's memory. ``step``: the gradient accumulated so far, None before the first
    micro-batch; ``data``: the rest of the step part, as plain data."""

    base: BaseState
    step: StateHandle | None
    data: StateData


@dataclass(frozen=True, slots=True)
class Moved:
    """``size_bytes`` that were copied between a slot and the host's memory, and the paths of the transport that they
    took, with commas; ``none`` if there was nothing to copy."""

    size_bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class Suspended:
    """The step part of a policy that was suspended: see ``HostState``."""

    step: StateHandle | None
    data: StateData
    moved: Moved


@dataclass(frozen=True, slots=True)
class SlotStepped:
    """One optimizer step. ``version``: the policy's after it."""

    version: int
    stats: StepStats


class SlotApi(Protocol):
    """One slot of the pool. Every call but ``enlist`` raises WorkerReplaced if it is meant for another life.

    A policy is hosted from ``build``, ``prefetch`` or ``resume`` until ``suspend`` or ``drop``. One computation runs at
    a time.
    """

    @endpoint
    def enlist(self) -> AsyncGenerator[SlotLife]:
        """This life of the worker: one item. The stream ends when the life does."""

    @endpoint(raises=[WorkerReplaced])
    async def enter(self, life: str, policy: PolicyName, rank: int, over_hosts: bool) -> str:
        """Waits until this process is in no other gang; then it is in the policy's, until ``suspend`` or ``drop``. The
        first rank opens the meeting, and returns its address: in the network if the gang lies ``over_hosts``, else of
        this host alone. The others return an empty text."""

    @endpoint(raises=[WorkerReplaced, CheckpointIncomplete, CheckpointMismatch])
    async def build(self, life: str, policy: PolicyName, place: GangPlace) -> None:
        """Hosts the policy as it begins the run."""

    @endpoint(raises=[WorkerReplaced])
    async def prefetch(self, life: str, policy: PolicyName, state: HostState) -> Moved:
        """Copies the state of a rank of a gang here, beside the policy that computes. ``resume`` takes the copy."""

    @endpoint(raises=[WorkerReplaced])
    async def resume(self, life: str, policy: PolicyName, place: GangPlace, state: HostState) -> Moved:
        """Hosts the policy as ``state`` has it. A rank of a gang has it already, by ``prefetch``."""

    @endpoint(raises=[WorkerReplaced])
    async def reshard(
        self, life: str, policy: PolicyName, place: GangPlace, ranks: list[tuple[HostState, StateBytes]]
    ) -> Moved:
        """Hosts the policy as the states of another number of ``ranks`` have it: copies this rank's rows of each."""

    @endpoint(raises=[WorkerReplaced])
    async def state_bytes(self, life: str, policy: PolicyName) -> StateBytes:
        """The memory that ``set_weights``, ``set_rest`` and ``suspend`` need."""

    @endpoint(raises=[WorkerReplaced])
    async def set_weights(self, life: str, policy: PolicyName, weights: LentMemory) -> SavedWeights:
        """Copies the weights into the host's memory, as they are published."""

    @endpoint(raises=[WorkerReplaced])
    async def set_rest(self, life: str, policy: PolicyName, rest: LentMemory, live: list[str]) -> SavedRest:
        """Copies the base part without its tensors ``live`` into the host's memory, as the last call that has changed
        it left it. Micro-batches may be computed meanwhile."""

    @endpoint(raises=[WorkerReplaced])
    async def suspend(self, life: str, policy: PolicyName, step: LentMemory) -> Suspended:
        """Copies the step part into the host's memory and hosts the policy no more."""

    @endpoint(raises=[WorkerReplaced])
    async def forget_copies(self, life: str, policy: PolicyName) -> None:
        """Frees copies of the rest and the step part in memory of this node, if the facade is on another one: those
        that it has fetched, and those that were fetched from it. Published weights stay."""

    @endpoint(raises=[WorkerReplaced])
    async def drop(self, life: str, policy: PolicyName) -> None:
        """Hosts the policy no more; its state here is forgotten. A collective call under way ends at once."""

    @endpoint(raises=[WorkerReplaced, StaleSample, SamplesUnreachable])
    async def accumulate(self, life: str, policy: PolicyName, leased: LeasedBatch) -> MicroBatchTrained:
        """Adds the gradient of leased rows, which this worker reads from the store's memory."""

    @endpoint(raises=[WorkerReplaced, NonFiniteGradient])
    async def optimizer_step(self, life: str, policy: PolicyName, step: Step) -> SlotStepped:
        """The run's step ``step`` (from 1)."""

    @endpoint(raises=[WorkerReplaced, RecipeError])
    async def sft(self, life: str, policy: PolicyName, first_batch: int, count: int) -> float:
        """See ``TrainerApi.sft``."""

    @endpoint(raises=[WorkerReplaced])
    async def end_sft(self, life: str, policy: PolicyName) -> None:
        """See ``PolicyBackend.sft_done``."""

    @endpoint(raises=[WorkerReplaced])
    async def save(self, life: str, policy: PolicyName, folder: str) -> None:
        """See ``TrainerApi.save``."""
