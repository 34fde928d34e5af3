"""The pool of hardware that a trainer computes on, as its facade sees it: one class for each kind, chosen by ``name``.

static   a thread of the trainer's own process, all policies for ever       (``static_pool.py``)
shared   slot workers, a process each, that host the policies in turn       (``shared_pool.py``)
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....core.waits import Wait
from ....transport.state import StateTransport
from ...figures import Numbers
from ...messages import LeasedBatch, MicroBatchTrained, Published, StepStats
from ...names import PolicyName, Step, Version
from ..arrival_order import Place


class TrainingPool(ABC):
    """The computations of a policy run one at a time, in the order of the calls."""

    @abstractmethod
    async def start(self) -> None:
        """Builds all policies. Raises CheckpointIncomplete or CheckpointMismatch for a folder that they can't start
        from."""

    @abstractmethod
    async def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        """See ``TrainerApi.sft``."""

    @abstractmethod
    async def end_sft(self, policy: PolicyName) -> None:
        """Ends the supervised training: reinforcement learning may follow."""

    @abstractmethod
    async def accumulate(
        self, policy: PolicyName, leased: LeasedBatch, place: Place | None = None
    ) -> MicroBatchTrained:
        """Adds the gradient of leased rows. ``place``: its turn is waited for before the computation is queued; None:
        the caller makes one call after the other. Raises SamplesUnreachable, and as ``PolicyBackend.accumulate``
        does."""

    @abstractmethod
    async def optimizer_step(self, policy: PolicyName, step: Step) -> tuple[StepStats, Version]:
        """The run's step ``step`` (from 1), and the policy's version after it. Raises as
        ``PolicyBackend.optimizer_step`` does."""

    @abstractmethod
    async def publish(self, policy: PolicyName) -> Published:
        """The weights as the last ``end_sft`` or ``optimizer_step`` left them, for the instances to fetch. To be called
        before the next of them."""

    async def saved(self, policy: PolicyName) -> None:  # noqa: B027  # the state of a static pool dies with the trainer
        """Returns when the policy's last optimizer step will not have to be computed again: its samples may be
        committed. Raises the error for which the policy can't continue."""

    @abstractmethod
    async def save(self, policy: PolicyName, folder: Path) -> None:
        """See ``PolicyBackend.save``."""

    @abstractmethod
    def waits(self) -> Sequence[Wait]:
        """See ``Actor.waits``: the computations under way."""

    @abstractmethod
    def progress(self) -> int:
        """See ``Actor.progress``: the computations that have ended."""

    @property
    @abstractmethod
    def transport(self) -> StateTransport:
        """Returns the transport of this process, which ``start`` opens."""

    @abstractmethod
    def rows_committed(self, policy: PolicyName) -> None:
        """The rows of the policy's last optimizer step are consumed: their memory may be forgotten."""

    def figures(self, policy: PolicyName) -> Numbers:
        """The policy's figures of a shared pool since the last call; empty if the pool is not shared."""
        return {}

    def take_moves(self) -> list[tuple[float, float]]:
        """The times since the last call in which states moved to the slots of a shared pool or from them: seconds
        before now of the begin and the end of each."""
        return []

    def actor_stopped(self, name: str) -> None:  # noqa: B027  # a static pool watches none
        """An actor that the pool watches was stopped in good order."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the pool. Does not wait for a computation under way."""

    @abstractmethod
    def statistics(self) -> Mapping[str, float]:
        """Figures by name, for ``Actor.statistics``."""
