"""The faults of a network in memory, drawn from a seed: loss, delay, duplicates, reordering, partitions."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RemoteProtocolError
from ..protocol import codec, messages
from ..protocol.envelopes import Kind

if TYPE_CHECKING:
    from .memory import MemoryWire

Frames = list[codec.Bytes]


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities and times of faults; drawn for each message separately.

    ``delay_s``: the least and the most seconds that a message, or connecting, takes. ``drop``: the message is lost.
    ``duplicate``: it arrives a second time, up to ``late_s`` seconds later. ``reorder``: it arrives up to ``late_s``
    seconds late, and later messages overtake it. Raises ValueError for an invalid probability or time.
    """

    delay_s: tuple[float, float] = (0.0, 0.0)
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    late_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be a probability, got {getattr(self, name)!r}")
        low, high = self.delay_s
        if not 0.0 <= low <= high or not self.late_s >= 0.0:
            raise ValueError(f"times must be ordered and not negative: {self.delay_s!r}, {self.late_s!r}")


NO_FAULTS = Faults()


class FaultyMedium:
    """Draws the faults of all messages, and keeps the partition and the log."""

    def __init__(self, seed: int, faults: Faults, keep_log: bool) -> None:
        self.faults = faults
        """May be changed at any time; applies to messages that are sent after that."""
        self.random = random.Random(seed)
        """Draws every fault. A script that draws from it too is part of what the seed determines."""
        self.log: list[str] = []
        """All events, in order: the time in seconds, the node (its name and incarnation), the event."""
        self.keeps_log = keep_log
        self._parted: set[tuple[str, str]] = set()
        self._cuts: set[tuple[str, str]] = set()
        """Pairs of hosts, in both orders."""
        self._held: dict[Pipe, None] = {}

    def note(self, subject: str, event: str) -> None:
        """Adds a line to ``log``."""
        if self.keeps_log:
            self.log.append(f"{asyncio.get_running_loop().time()!r} {subject} {event}")

    def part(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Messages between the hosts of a pair are lost from now on, in both directions, and between no others."""
        self._parted = _both_ways(pairs)

    def hold(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Messages between the hosts of a pair wait from now on, and between no others."""
        self._cuts = _both_ways(pairs)
        held, self._held = self._held, {}
        for pipe in held:
            pipe.proceed()

    def loses(self, host: str, other: str) -> bool:
        """``host``, ``other``: two hosts."""
        return bool(self._parted) and (host, other) in self._parted

    def holds(self, host: str, other: str) -> bool:
        """True if messages between two hosts wait."""
        return bool(self._cuts) and (host, other) in self._cuts

    def wait_mended(self, pipe: "Pipe") -> None:
        """``proceed`` is called after the next change."""
        self._held[pipe] = None

    def delay_s(self) -> float:
        """Draws the seconds that a message takes."""
        low, high = self.faults.delay_s
        return low if low == high else self.random.uniform(low, high)

    def late_s(self) -> float:
        """Draws the seconds by which a message comes out of order."""
        return self.random.uniform(0.0, self.faults.late_s)

    def happens(self, probability: float) -> bool:
        """Draws whether a fault of that probability happens."""
        return probability > 0.0 and self.random.random() < probability


def _both_ways(pairs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    return {way for host, other in pairs for way in ((host, other), (other, host))}


class Pipe:
    """One direction of a connection: keeps the order, except for the faults."""

    def __init__(
        self,
        medium: FaultyMedium,
        sender: "MemoryWire",
        receiver: "MemoryWire",
        deliver: Callable[[Frames], None],
        ended: Callable[[], None],
    ) -> None:
        """``deliver``, ``ended``: called at the receiver, for each message and for the end."""
        self._medium = medium
        self._sender = sender
        self._receiver = receiver
        self._deliver = deliver
        self._ended = ended
        self._ordered: deque[tuple[float, Frames | None]] = deque()
        """Messages under way, with the time at which each is due; None: the end."""
        self._last_due_s = 0.0

    def send(self, frames: Frames) -> None:
        """Sends a message, as the faults have it. Does not notify either side of a loss."""
        # A copy of the buffers: their owner may change them before the receiver reads them.
        sent: Frames = [
            frame if isinstance(frame, bytes) else memoryview(bytearray(frame)) for frame in frames
        ]
        self._sender.when_awake(lambda: self._leave(sent))

    def end(self) -> None:
        """Ends the pipe behind all messages that were sent."""
        self._enqueue(None)

    def _leave(self, frames: Frames) -> None:
        medium, faults = self._medium, self._medium.faults
        if self._is_lost():
            self._note("is lost in the partition", frames)
            return
        if medium.happens(faults.drop):
            self._note("is lost", frames)
            return
        loop = asyncio.get_running_loop()
        twice = medium.happens(faults.duplicate)
        self._note("is sent twice" if twice else "is sent", frames)
        if medium.happens(faults.reorder):
            loop.call_later(medium.delay_s() + medium.late_s(), self._arrive, frames)
        else:
            self._enqueue(frames)
        if twice:
            loop.call_at(max(loop.time(), self._last_due_s) + medium.late_s(), self._arrive, frames)

    def _enqueue(self, frames: Frames | None) -> None:
        loop = asyncio.get_running_loop()
        delay_s = self._medium.delay_s()
        # Each message draws its own delay. One that draws less than the message before it waits for that one: a
        # connection keeps its order, and what overtakes is drawn as ``reorder``.
        self._last_due_s = max(self._last_due_s, loop.time() + delay_s)
        self._ordered.append((self._last_due_s, frames))
        if len(self._ordered) == 1:
            self._schedule()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._ordered[0][0]
        if due_s <= loop.time():
            loop.call_soon(self._deliver_first)
        else:
            loop.call_at(due_s, self._deliver_first)

    def _deliver_first(self) -> None:
        if self._is_held():
            self._medium.wait_mended(self)
            return
        self._arrive(self._ordered.popleft()[1])
        if self._ordered:
            self._schedule()

    def proceed(self) -> None:
        """The link may have been mended."""
        self._schedule()

    def _arrive(self, frames: Frames | None) -> None:
        if self._is_held():  # a message that came out of order: it is behind the others now
            self._enqueue(frames)
        elif self._is_lost():
            if frames is not None:
                self._note("is lost in the partition", frames)
        elif frames is None:
            self._receiver.when_awake(self._ended)
        else:
            self._receiver.when_awake(lambda: self._receive(frames))

    def _receive(self, frames: Frames) -> None:
        self._note("arrives", frames)
        self._deliver(frames)

    def _is_lost(self) -> bool:
        return self._medium.loses(self._sender.host, self._receiver.host)

    def _is_held(self) -> bool:
        return self._medium.holds(self._sender.host, self._receiver.host)

    def _note(self, event: str, frames: Frames) -> None:
        if self._medium.keeps_log:
            self._medium.note(
                f"{self._sender.label} > {self._receiver.label}", f"{_contents(frames)} {event}"
            )


def _contents(frames: Frames) -> str:
    """The kinds and ids of a message's envelopes."""
    try:
        size = messages.unpack_header(frames[0])[2]
        envelopes = messages.unpack_envelopes(frames[0][size:], frames[1:])
    except RemoteProtocolError:
        return "rubbish"  # a test sent it
    return ", ".join(f"{Kind(envelope[0]).name} {envelope[1]}" for envelope in envelopes)
