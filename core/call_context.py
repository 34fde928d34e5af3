"""The request that the running code serves, for log lines and trace ids: below everything that logs."""

from contextvars import ContextVar
from typing import Protocol


class ServedRequest(Protocol):
    """A request while its handler runs (``delivery.mailbox.Delivery``)."""

    @property
    def actor(self) -> str:
        """The name of the actor that serves it."""
        ...

    @property
    def node(self) -> str:
        """The name of that actor's system."""
        ...

    @property
    def message_id(self) -> str:
        """``SENDER:NUMBER``."""
        ...

    @property
    def trace_id(self) -> int:
        """The id of the request that began the chain of calls."""
        ...


current_delivery: ContextVar[ServedRequest | None] = ContextVar("flexmarl_delivery", default=None)
"""Set while a handler runs, also in the tasks that it starts; None elsewhere."""
