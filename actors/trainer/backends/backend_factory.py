"""The interface of a kind of backend: it builds those of a process, and computes for all of them in one place."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from ....transport.handle import TensorSpec
from ...chat.text_codec import TextCodec
from ...messages import NO_GANG, GangPlace
from ...names import PolicyName
from ..trainer_setup import PolicySetup
from .policy_backend import PolicyBackend
from .weights_source import WeightsSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .torch_policy.gang_meeting import Meeting, Membership
    from .torch_policy.gang_rank import GangRank

T = TypeVar("T")


class BackendFactory(ABC):
    """One kind of backend; ``trainer_setup`` names it. One computation runs at a time, in the order of the calls."""

    @abstractmethod
    def build(
        self,
        policy: PolicyName,
        setup: PolicySetup,
        gang: "GangRank | None" = None,
        *,
        place: GangPlace = NO_GANG,
    ) -> PolicyBackend:
        """The policy's backend before its first step. To be called within ``compute``.

        ``gang``: the ranks that this process computes the policy with, None: it does so alone. ``place``: of this rank,
        also of a gang without a process group.
        """

    @abstractmethod
    def frozen_weights(self, policy: PolicyName, setup: PolicySetup) -> WeightsSource:
        """The weights to publish of a policy that is not trained: those of ``setup.init_from``, or its initial ones.
        To be called within ``compute``. Raises CheckpointIncomplete, CheckpointMismatch."""

    @abstractmethod
    def memory(self, policy: PolicyName, setup: PolicySetup, tensors: Iterable[TensorSpec]) -> dict[str, Any]:
        """Memory on the policy's device for a state that is loaded before its gang meets. Its contents are not set. It
        may be that of a released backend, with more tensors. To be called in a thread, at any time, beside a
        computation: a device may let it wait. Raises NoRoomForState, as do ``build`` and ``host``."""

    @abstractmethod
    def host(
        self,
        policy: PolicyName,
        setup: PolicySetup,
        gang: "GangRank | None" = None,
        memory: dict[str, Any] | None = None,
        *,
        place: GangPlace = NO_GANG,
    ) -> PolicyBackend:
        """The policy's backend, to have a state loaded before any other call: its weights are not set.

        It may take the memory of a backend that was released. ``memory``, if given, has the state's tensors: it is
        taken over, and only ``PolicyBackend.load_state`` is left to be called. To be called within ``compute``.
        """

    @abstractmethod
    def release(self, backend: PolicyBackend) -> None:
        """Ends the use of ``backend``: its memory is kept for another policy that fits into it, or freed. Kept
        memory is freed before a policy that does not fit takes other memory."""

    def free_released(self) -> None:
        """Frees at once all that released backends have left but for the memory that is kept: after their gang has
        ended, and no caller has them any more. To be called within ``compute``."""
        return

    def open_meeting(self, host: str) -> "Meeting | None":
        """Opens the meeting of a gang at ``host``, an address of this host. May be called at any time, beside a
        computation. None: gangs have no process group."""
        return None

    def membership(self, setup: PolicySetup, place: GangPlace) -> "Membership | None":
        """This process in a gang, for ``build`` and ``host``. To be joined and left within ``compute``, by all of the
        gang. None: without a process group."""
        return None

    @abstractmethod
    def tokenizer(self, setup: PolicySetup) -> "PreTrainedTokenizerBase":
        """The policy's tokenizer. To be called within ``compute``."""

    @abstractmethod
    def codec(self, setup: PolicySetup, tokenizer: "PreTrainedTokenizerBase") -> TextCodec:
        """Text as tokens by a ``tokenizer`` of this factory, as the policy's engine reads prompts."""

    @abstractmethod
    async def compute(self, function: Callable[[], T]) -> T:
        """The result of ``function()``, after all earlier computations."""

    @abstractmethod
    def close(self) -> None:
        """Forgets the computations that have not begun. Does not wait for the one under way."""
