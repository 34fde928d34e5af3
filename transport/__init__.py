"""Set and Get of named tensor collections, wherever they are.

``StateTransport`` is the object to use; ``StateHandle`` is the plain data it hands out. Importing this
package or ``flexmarl.transport.handle`` does not import torch: ``StateTransport`` is loaded when asked for.
"""

from typing import TYPE_CHECKING, Any

from .handle import StateHandle, TensorSpec
from .select import Place

if TYPE_CHECKING:
    from .state import StateTransport, TransportStatistics

__all__ = ["Place", "StateHandle", "StateTransport", "TensorSpec", "TransportStatistics"]


def __getattr__(name: str) -> Any:
    if name in ("StateTransport", "TransportStatistics"):
        from . import state

        return getattr(state, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
