"""Set and Get of named tensor collections, in any process of the run.

``StateTransport`` is the object to use; ``StateHandle`` is the plain data that it returns. Importing this package or
``flexmarl.transport.handle`` does not import torch: ``StateTransport`` is loaded at its first use.
"""

from typing import TYPE_CHECKING

from ..core.front_door import lazy_exports
from .handle import StateHandle, TensorSpec
from .select import Place

if TYPE_CHECKING:
    from .state import PathStatistics, StateTransport, TransportStatistics
else:
    __getattr__ = lazy_exports(
        __name__, {"state": ["PathStatistics", "StateTransport", "TransportStatistics"]}
    )

__all__ = [
    "PathStatistics",
    "Place",
    "StateHandle",
    "StateTransport",
    "TensorSpec",
    "TransportStatistics",
]
