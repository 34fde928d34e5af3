"""A link between the reader of a state and its owner, in this process, that can be cut and can change bytes."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Link:
    """Passes bytes on while it is up. ``passed``: bytes that went to the reader. An async context manager."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.up = asyncio.Event()
        self.up.set()
        self.passed = 0
        self.at: tuple[int, Callable[[], None]] | None = None
        """Called once, when so many bytes have passed."""
        self.change: Callable[[int, bytearray], None] | None = None
        """Called with the number of each byte that comes first, and the bytes."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "Link":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Ends all connections."""
        for writer in list(self._writers):
            writer.close()

    def cut(self) -> None:
        """Ends all connections; further ones are refused."""
        self._server.close()
        self.reset()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            host, port = self._owner.split(":")
            their_reader, their_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        self._writers.add(their_writer)
        with suppress(OSError):
            there, back = self._pass(reader, their_writer, False), self._pass(their_reader, writer, True)
            await asyncio.gather(there, back)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool) -> None:
        while received := bytearray(await reader.read(1 << 16)):
            await self.up.wait()
            if counts:
                if self.change is not None:
                    self.change(self.passed, received)
                self.passed += len(received)
                if self.at is not None and self.passed >= self.at[0]:
                    (_, call), self.at = self.at, None
                    call()
                    await self.up.wait()
            writer.write(received)
            await writer.drain()
        writer.close()
