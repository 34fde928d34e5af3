"""The time that transfers of a simulated process take on the links of a cluster, beside that of this machine."""

from contextvars import ContextVar
from typing import Literal, Protocol


class Pacing(Protocol):
    """The links of one process."""

    def opened(self, memory: str) -> None:
        """The process has memory for states; ``memory`` names it in all processes."""
        ...

    async def pace(
        self, operation: Literal["set", "get"], key: str, version: int, size_bytes: int, memory: str
    ) -> None:
        """Returns when the transfer, which this machine has done, has ended on the links. ``size_bytes``: that this
        machine has moved. ``memory``: the one that the state lies in, or is copied to."""
        ...


pacing: ContextVar[Pacing | None] = ContextVar("flexmarl_pacing", default=None)
"""Set in all tasks of a simulated process; None elsewhere."""
