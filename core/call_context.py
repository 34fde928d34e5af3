"""The request that the running code serves, for log lines and trace ids: below everything that logs."""

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .delivery.mailbox import Delivery

current_delivery: ContextVar["Delivery | None"] = ContextVar("flexmarl_delivery", default=None)
"""Set while a handler runs, also in the tasks that it starts; None elsewhere."""
