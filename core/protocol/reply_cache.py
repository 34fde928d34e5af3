"""The replies of idempotent calls: a repeated call gets its first reply, and its handler runs once.

The caller repeats an idempotent call under the same key ``(sender, epoch, seq)``: the sender's name, which holds its
lineage, the number of the sender's incarnation in it (``incarnations.py``), and the call's number in that, from 0.

Rules:
- the first reply of a key stays its reply; a later ``put`` of the key changes nothing;
- a sender acknowledges the calls that it will never repeat (``settle``, ``forget_sender``). A reply that comes after
  that is not kept, and ``is_settled`` distinguishes a late repetition from a new call;
- memory is bounded: over the limit, senders without replies are forgotten, then the oldest replies, and counted.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

Key = tuple[str, int, int]

DEFAULT_LIMIT_BYTES: Final = 64 * 2**20
# Memory of one reply in CPython 3.11, besides its bytes and the sender's name: measured, and rounded up.
_ENTRY_BYTES: Final = 400


@dataclass(frozen=True, slots=True)
class ReplyCacheStatistics:
    """``evicted``: replies that were forgotten for lack of room before they were settled: their calls would run again.
    ``size_bytes``: the memory of all, with Python's overhead, never more than ``limit_bytes``."""

    replies: int
    senders: int
    size_bytes: int
    limit_bytes: int
    evicted: int


class _Window:
    """One incarnation of a sender: seqs below ``acknowledged_below`` are settled, those in ``seqs`` have a reply."""

    __slots__ = ("acknowledged_below", "seqs")

    def __init__(self) -> None:
        self.acknowledged_below = 0
        self.seqs: set[int] = set()


class _Sender:
    """``replies``: their number, of all incarnations; incarnations before ``before_epoch`` have ended."""

    __slots__ = ("before_epoch", "name_bytes", "replies", "windows")

    def __init__(self, name: str) -> None:
        self.name_bytes = len(name.encode("utf-8", "surrogatepass"))
        self.before_epoch = 0
        self.replies = 0
        self.windows: dict[int, _Window] = {}


class ReplyCache:
    """The replies of idempotent calls, by key. Every operation takes constant time, amortised over calls made."""

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.evicted = 0
        # Ordered, as popping the oldest of a plain dict again and again takes quadratic time.
        self._replies: OrderedDict[Key, bytes] = OrderedDict()
        self._senders: dict[str, _Sender] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # senders without replies
        self._content_bytes = 0
        self._entries = 0  # replies, windows and senders

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def size_bytes(self) -> int:
        return self.stored_bytes(_ENTRY_BYTES)

    def stored_bytes(self, entry_bytes: int) -> int:
        """The size of the whole content if each item takes ``entry_bytes`` besides its name and its reply."""
        return self._content_bytes + self._entries * entry_bytes

    def get(self, key: Key) -> bytes | None:
        return self._replies.get(key)

    def is_settled(self, key: Key) -> bool:
        """True if the sender will never send or repeat the call of this key. Such a call must not run."""
        name, epoch, seq = key
        sender = self._senders.get(name)
        if sender is None:
            return False
        window = sender.windows.get(epoch)
        return epoch < sender.before_epoch or (window is not None and seq < window.acknowledged_below)

    def put(self, key: Key, reply: bytes) -> bool:
        """Remembers a reply. True if it is remembered now and was not before."""
        if key in self._replies or self.is_settled(key):
            return False
        name, epoch, seq = key
        # A reply, its window and its sender; four bytes of UTF-8 per character at most.
        if len(reply) + 3 * (_ENTRY_BYTES + 4 * len(name)) > self.limit_bytes:
            self.evicted += 1  # it would push out all others and then itself
            return False
        sender = self._sender(name)
        if not sender.replies:
            del self._idle[name]
        self._window(sender, epoch).seqs.add(seq)
        sender.replies += 1
        self._replies[key] = reply
        self._entries += 1
        self._content_bytes += sender.name_bytes + len(reply)
        self._make_room()
        return key in self._replies

    def settle(self, sender: str, epoch: int, acknowledged_below: int) -> bool:
        """Forgets every seq below ``acknowledged_below`` of one incarnation. False if they were settled before."""
        state = self._senders.get(sender)
        if acknowledged_below <= 0 or (state is not None and epoch < state.before_epoch):
            return False
        window = self._window(self._sender(sender), epoch)
        first = window.acknowledged_below
        if acknowledged_below <= first:
            return False
        # The shorter loop of the two; in total each number is visited once, so that each call takes constant time.
        if acknowledged_below - first <= len(window.seqs):
            settled = [seq for seq in range(first, acknowledged_below) if seq in window.seqs]
        else:
            settled = [seq for seq in window.seqs if seq < acknowledged_below]
        window.acknowledged_below = acknowledged_below
        for seq in settled:
            self._forget((sender, epoch, seq))
        self._make_room()
        return True

    def forget_sender(self, sender: str, before_epoch: int) -> bool:
        """Forgets all incarnations of a sender before ``before_epoch``. False if they were forgotten before."""
        if before_epoch <= 0:
            return False
        state = self._sender(sender)
        if before_epoch <= state.before_epoch:
            return False
        state.before_epoch = before_epoch
        for epoch in [epoch for epoch in state.windows if epoch < before_epoch]:
            for seq in list(state.windows[epoch].seqs):
                self._forget((sender, epoch, seq))
            self._drop_window(state, epoch)
        self._make_room()
        return True

    def items(self) -> Iterator[tuple[Key, bytes]]:
        """All replies, oldest first."""
        return iter(self._replies.items())

    def settled(self) -> Iterator[tuple[str, int, list[tuple[int, int]]]]:
        """All settled calls: sender, its first epoch that has not ended, and (epoch, acknowledged_below) of each
        incarnation. The senders that will be forgotten first come first."""
        for name in (*self._idle, *(name for name in self._senders if name not in self._idle)):
            sender = self._senders[name]
            yield (
                name,
                sender.before_epoch,
                [(epoch, window.acknowledged_below) for epoch, window in sender.windows.items()],
            )

    def statistics(self) -> ReplyCacheStatistics:
        return ReplyCacheStatistics(
            replies=len(self._replies),
            senders=len(self._senders),
            size_bytes=self.size_bytes,
            limit_bytes=self.limit_bytes,
            evicted=self.evicted,
        )

    def _sender(self, name: str) -> _Sender:
        sender = self._senders.get(name)
        if sender is None:
            sender = self._senders[name] = _Sender(name)
            self._idle[name] = None
            self._entries += 1
            self._content_bytes += sender.name_bytes
        return sender

    def _window(self, sender: _Sender, epoch: int) -> _Window:
        window = sender.windows.get(epoch)
        if window is None:
            window = sender.windows[epoch] = _Window()
            self._entries += 1
            self._content_bytes += sender.name_bytes
        return window

    def _forget(self, key: Key) -> None:
        name, epoch, seq = key
        sender = self._senders[name]
        sender.windows[epoch].seqs.remove(seq)
        sender.replies -= 1
        if not sender.replies:
            self._idle[name] = None
        self._entries -= 1
        self._content_bytes -= sender.name_bytes + len(self._replies.pop(key))

    def _drop_window(self, sender: _Sender, epoch: int) -> None:
        del sender.windows[epoch]
        self._entries -= 1
        self._content_bytes -= sender.name_bytes

    def _make_room(self) -> None:
        while self.size_bytes > self.limit_bytes and self._senders:
            if self._idle:
                name, _ = self._idle.popitem(last=False)
                sender = self._senders.pop(name)
                self._entries -= 1 + len(sender.windows)
                self._content_bytes -= sender.name_bytes * (1 + len(sender.windows))
            else:
                self._forget(next(iter(self._replies)))
                self.evicted += 1
