"""The roles of a run. For the author of a workflow: ``Agent``, ``Query``, ``Rewards``, ``Turn``; for a client of the
experience store: ``StoreApi``.

Names are imported when they are first used. None of them imports torch.
"""

from typing import TYPE_CHECKING

from ..core.front_door import lazy_exports

if TYPE_CHECKING:
    from .messages import Query, StoreApi
    from .workflow import Agent, Rewards, Turn
else:
    __getattr__ = lazy_exports(
        __name__, {"messages": ["Query", "StoreApi"], "workflow": ["Agent", "Rewards", "Turn"]}
    )

__all__ = ["Agent", "Query", "Rewards", "StoreApi", "Turn"]
