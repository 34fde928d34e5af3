"""The receiver of arrays in ``flexmarl bench calls``."""

from ...core.actor import Actor, endpoint
from ...transport.message_arrays import Array


class Sink(Actor):
    @endpoint
    async def take(self, array: Array) -> int:
        """Returns the array's last byte, which identifies it."""
        return int(array[-1])
