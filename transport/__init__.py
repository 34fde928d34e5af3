"""Set and Get of named tensor collections, in any process of the run.

``StateTransport`` is the object to use; ``StateHandle`` is the plain data that it returns. Importing this package or
``flexmarl.transport.handle`` does not import torch: ``StateTransport`` is loaded at its first use.
"""

from typing import TYPE_CHECKING

from ..core.base.front_door import lazy_exports
from .handle import LentMemory, StateHandle, TensorSpec
from .remote.bulk import Bulk
from .select import Place
from .statistics import PathStatistics, TransportStatistics

if TYPE_CHECKING:
    from .state import StateTransport
else:
    __getattr__ = lazy_exports(__name__, {"state": ["StateTransport"]})

__all__ = [
    "Bulk",
    "LentMemory",
    "PathStatistics",
    "Place",
    "StateHandle",
    "StateTransport",
    "TensorSpec",
    "TransportStatistics",
]
