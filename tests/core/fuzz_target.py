"""A system without sockets, to be fed with anything: for ``test_fuzz.py`` and ``scripts/fuzz_decoder.py``."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.delivery.connection import Connection
from flexmarl.core.delivery.mailbox import Mailbox
from flexmarl.core.delivery.peers import Network
from flexmarl.core.errors import FlexmarlError
from flexmarl.core.protocol import codec, messages
from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.session import Settings
from flexmarl.core.signature import signature_of
from flexmarl.core.wire.wire import Frames, Link, Listener

ADDRESS = "memory://fuzzed"


class Refused(FlexmarlError):
    def __init__(self, number: int, words: tuple[str, ...] = ()) -> None:
        super().__init__(f"number {number} is refused: {words}")
        self.number = number
        self.words = words


class Target(Actor):
    @endpoint(raises=(Refused,))
    async def echo(self, value: int = 0) -> int:
        if value < 0:
            raise Refused(value)
        return value

    @endpoint
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @endpoint(raises=(Refused,))
    async def count(self, items: int) -> AsyncIterator[int]:
        for number in range(items):
            yield number


class SilentWire:
    """Leads nowhere: what is sent is counted and dropped."""

    epoch = 7
    address = "memory://target"

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.header = b""

    def start(self, header: bytes, listener: Listener) -> None:
        self.header = header

    def first_epoch(self, actor: str) -> int:
        return 0

    def connect(self, address: str) -> Link:
        return Link(address, self.header, self._transmit)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return asyncio.get_running_loop().time()

    def disconnect(self, link: Link) -> None:
        link.forget_unsent()

    def close(self) -> None: ...

    def _transmit(self, frames: Sequence[codec.Bytes]) -> None:
        self.sent_bytes += sum(len(frame) for frame in frames)


class Fuzzed:
    """A network with an actor, a peer that was asked for one of everything, and a stranger that comes in."""

    def __init__(self) -> None:
        self.wire = SilentWire()
        self.mailboxes: dict[str, Mailbox] = {}
        self.network = Network("fuzzed", self.wire, Settings(), self.mailboxes)
        self.network.start()
        self.mailboxes["target"] = mailbox = Mailbox("target", "fuzzed", None, self.wire.now)
        mailbox.open(Target())
        self.incoming = self.wire.connect("a stranger")
        pong = messages.join([codec.Encoder().pack([Kind.PONG, 0, []])])
        self.network.received(self.incoming, header() + pong, [])
        self.asked = self.network.connection(ADDRESS)
        serve_at_once(self.incoming)
        serve_at_once(self.asked.link)
        self.asked.connected()
        signature = signature_of(Target, "echo")
        callee = self.asked.outbound.callee("far", "echo", 30.0)
        self.calls = [
            asyncio.ensure_future(self.asked.outbound.call(callee, (1,), {}, signature)),
            asyncio.ensure_future(self.asked.outbound.tell("far", "echo", (1,), {}, 30.0)),
            asyncio.ensure_future(self._stream(self.asked)),
        ]

    async def _stream(self, connection: Connection) -> list[Any]:
        return [
            item
            async for item in connection.outbound.stream(
                "far", "count", (3,), {}, 30.0, signature_of(Target, "count")
            )
        ]

    def feed(self, message: codec.Bytes, buffers: Frames = ()) -> None:
        """Passes a message on as the wire does, from the stranger and from the peer that was called."""
        self.network.received(self.incoming, message, buffers)
        self.network.received(self.asked.link, message, buffers)

    async def close(self) -> None:
        self.network.close()
        tasks = [task for mailbox in self.mailboxes.values() for task in mailbox.fail(RuntimeError("closed"))]
        await asyncio.gather(*tasks, *self.calls, return_exceptions=True)


def header() -> bytes:
    return messages.pack_header("stranger", 5 << 24 | 1)  # another lineage than that of other peers


def serve_at_once(link: Link) -> None:
    """The requests of this peer, which confirms no mark, begin when they come."""
    link.connection.inbound.lease.confirmed(math.inf)


def valid_envelopes() -> list[list[Any]]:
    """One of each kind, and of each endpoint."""
    return [
        [Kind.CALL, 1, "target", "echo", 1.0, [[3], {}, 1]],
        [Kind.CALL, 2, "target", "wait", 1.0, [[], {}, 1]],
        [Kind.CALL, 3, "target", "echo", 1.0, [[], {"value": 4}, 1]],
        [Kind.TELL, 4, "target", "echo", 1.0, [[], {}, 1]],
        [Kind.STREAM, 5, "target", "count", 1.0, 2, [[5], {}, 1]],
        [Kind.CALL, 6, "missing", "echo", 1.0, [[], {}, 1]],
        [Kind.CALL, 7, "target", "echo", 1.0, [[3], {}, 1, [], {"value": 4}, 2, [5], {}, 1]],
        [Kind.TELL, 10, "missing", "echo", 1.0, [[3], {}, 1, [4], {}, 2]],
        [Kind.REPLY, 1, [{"a": [1, 2.5, None, b"raw"]}]],
        [Kind.REPLY, 1, [None, {"a": 1}, 3]],
        [Kind.ERROR, 2, "ValueError", "words", "traceback", "", {}],
        [Kind.ERROR, 1, "Refused", "words", "traceback", "Refused", {"number": 3, "words": ["a"]}],
        [Kind.ERROR, 3, "Refused", "words", "traceback", "Refused", {"number": 3}],
        [Kind.ITEM, 3, 0, "item"],
        [Kind.CANCEL, 2],
        [Kind.GRANT, 5, 3],
        [Kind.DONE, 0, [1, 2, 4, 9]],
        [Kind.PING, 5],
        [Kind.PONG, 3, [1, 2]],
        [Kind.REFUSE, 0, "no"],
        [Kind.BYE, 0],
    ]
