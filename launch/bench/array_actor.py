"""The actor that takes arrays in ``flexmarl bench calls``."""

from ...core.actor import Actor, endpoint
from ...transport.message_arrays import Array


class Sink(Actor):
    @endpoint
    async def take(self, array: Array) -> int:
        """Its last byte, which says which array it is."""
        return int(array[-1])
