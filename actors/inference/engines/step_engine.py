"""An engine that computes one step at a time, when it is called.

It is a synchronous, single-threaded compute object. It has no event loop, thread or socket of its own:
``ThreadedEngine`` calls it from one worker thread, and every call but ``step`` returns at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ....transport.handle import StateHandle
from ...expert_routes import Routes
from .engine import EngineRequest, EngineResult, EngineStatistics


class StepEngine(ABC):
    """Only ``statistics`` may be called while another call runs."""

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Queues a request; a later ``step`` returns its result.

        Raises PromptTooLong if the prompt and ``max_new_tokens`` exceed the context, and InvalidRequest if the id is in
        use or a token is outside the vocabulary.
        """

    @abstractmethod
    def step(self) -> list[EngineResult]:
        """Admits waiting requests, advances every running one and returns those that finished, in any order.

        Without a request it returns an empty list at once. Raises NonFiniteLogits if the model's output is infinite or
        not a number; the requests stay, to be aborted. Raises InvalidRequest for one that the engine can't continue: it
        stays too.
        """

    @abstractmethod
    def abort(self, request_id: str) -> EngineResult | None:
        """Ends a request now and returns the tokens generated so far, as ``interrupted``; ``step`` returns no result of
        it. Returns None for an unknown or finished request."""

    @abstractmethod
    def new_tokens(self, token_counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """The tokens of running requests beyond those that are known: ``token_counts`` has their number for each
        request. Requests without any are left out."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Requests that are waiting or running, and results that no ``step`` has returned yet."""

    @property
    def reads_in_place(self) -> bool:
        """True if the engine itself copies new weights out of the memory that they lie in."""
        return False

    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """The engine's own tensors by state-dict name, to be overwritten in place, then followed by ``weights_loaded``.
        If it ``reads_in_place``: tensors of their names, shapes and dtypes, without memory.

        PyTorch's, or all NumPy arrays. Tied weights appear once, under the first of their names.
        """

    def room_for(self, handle: StateHandle) -> dict[str, Any]:
        """The tensors that the weights of ``handle`` are to be copied into: ``weights()``, unless the engine takes
        adapters of any shape."""
        return self.weights()

    @abstractmethod
    def weights_loaded(self, tensors: Mapping[str, Any], adapter: str = "") -> None:
        """Takes over new weights: ``tensors`` are those of ``weights``, or the ones to read in place; these stay as
        they are until this returns. Reuses nothing that was derived from the former weights (cached keys and values,
        packed copies). ``adapter``: see ``Engine.load``.

        Raises RequestsInFlight if a request of the adapter is pending: it would continue under other weights.
        """

    def replay(self, prompt: tuple[int, ...], routes: Routes) -> EngineResult | None:
        """One greedy token behind ``prompt``, whose tokens are computed with the experts ``routes``. The routes of the
        result are the experts that the engine would have chosen. None if it can't, or has no room for it now. Raises
        NonFiniteLogits."""
        return None

    def digests(self) -> Mapping[str, int]:
        """A digest of each tensor that the engine computes with, by ``tensor_digest.py``: by their names in
        ``weights``, or by others if they are not as published. Empty if the engine can't read them."""
        return {}

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """The counters; from any thread, at any time."""

    def close(self) -> None:  # noqa: B027  # most engines have nothing to end
        """Ends processes and frees memory that are not freed with this object. The last call."""
