"""Fetches ranges of bytes that another process serves by name (``server.NamedBytes``).

The names mean something to the two ends alone. Here are the connection, the deadline and the digests.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

import xxhash

from ..errors import ForeignHandle, RangesLost
from .bulk import Bulk, Refused, exactly, receive_into, refusal, secure
from .fetch import connect
from .frames import REPLY_BYTES, Answer, BadFrame, NamedRange, Reply

# More than of a state's ranges: these are small, and a round trip for each would take longer than its bytes.
_REQUESTS_AHEAD: Final = 16
_PAUSE_S: Final = 0.1


def fetch_ranges(
    bulk: Bulk, address: str, ranges: Sequence[NamedRange], timeout_s: float, stop: threading.Event
) -> dict[NamedRange, memoryview]:
    """Returns the bytes of each range, read-only. Connects again until the deadline; blocks, so it is for a thread.

    Raises RangesLost: nothing listens at ``address`` (host and port) or the keys differ, a name is unknown there, the
    deadline is over or ``stop`` is set while the connection is down, or bytes have come wrong twice.
    """
    contents: dict[NamedRange, memoryview] = {}
    missing = list(dict.fromkeys(ranges))
    give_up_at = time.monotonic() + timeout_s
    wrong_count = 0

    def error_of(reason: str) -> RangesLost:
        return RangesLost(address, sum(request not in contents for request in missing), reason)

    while missing:
        try:
            with (
                closing(connect(address)) as raw,
                closing(secure(raw, bulk, server=False)) as connection,
            ):
                for request, memory in _receive(connection, missing):
                    if memory is not None:
                        contents[request] = memory
                        continue
                    # Once may be the network's fault; twice is the owner's, and would come again.
                    wrong_count += 1
                    if wrong_count > 1:
                        raise error_of("bytes have another digest than they were sent with")
        except (Refused, BadFrame, ForeignHandle, ConnectionRefusedError, socket.gaierror) as error:
            raise error_of(str(error)) from error
        except OSError as error:
            if (refused := refusal(error)) is not None:
                raise error_of(str(refused)) from error
            if stop.is_set() or time.monotonic() >= give_up_at:
                raise error_of(f"{error}, for {timeout_s:g} s") from error
            stop.wait(_PAUSE_S)
        missing = [request for request in missing if request not in contents]
    return contents


def _receive(
    connection: socket.socket, ranges: Sequence[NamedRange]
) -> Iterator[tuple[NamedRange, memoryview | None]]:
    """Each range with its bytes; None if they have another digest. Raises OSError, BadFrame, ForeignHandle."""
    request_count = 0
    for number, request in enumerate(ranges):
        while request_count < min(len(ranges), number + _REQUESTS_AHEAD):
            connection.sendall(ranges[request_count].encode())
            request_count += 1
        reply = Reply.decode(exactly(connection, REPLY_BYTES))
        if reply.answer is Answer.FOREIGN:
            raise ForeignHandle(request.name, "its owner", "it is not there")
        if reply.answer is not Answer.NAMED or reply.size_bytes != request.end - request.start:
            raise BadFrame(f"{reply.answer.name} with {reply.size_bytes} bytes")
        memory = memoryview(bytearray(reply.size_bytes))
        receive_into(connection, memory)
        is_right = xxhash.xxh3_64_intdigest(memory) == reply.number
        yield request, memory.toreadonly() if is_right else None
