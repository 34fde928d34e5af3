"""Set and Get of named tensor collections, in any process of the run.

``StateTransport`` is the object to use; ``StateHandle`` is the plain data that it returns. Importing this package or
``flexmarl.transport.handle`` does not import torch: ``StateTransport`` is loaded at its first use.
"""

from typing import TYPE_CHECKING, Any

from .handle import StateHandle, TensorSpec
from .select import Place

if TYPE_CHECKING:
    from .state import PathStatistics, StateTransport, TransportStatistics

__all__ = [
    "PathStatistics",
    "Place",
    "StateHandle",
    "StateTransport",
    "TensorSpec",
    "TransportStatistics",
]


def __getattr__(name: str) -> Any:
    if name in ("PathStatistics", "StateTransport", "TransportStatistics"):
        from . import state

        return getattr(state, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
