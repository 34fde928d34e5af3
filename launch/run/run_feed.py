"""The steps and events of a run, for its display and for any number of readers in this program.

Each reader has all that comes after it was made. Items that it has not taken yet are kept in memory: a slow reader
delays nothing. Followers in other programs read the run's files (``run_control.py``), as ``Pulse`` wakes them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Generic, Self, TypeVar
from weakref import WeakSet

from ...actors.run_events import RunEvent
from ...actors.step_metrics import StepMetrics
from ..monitoring.console.display import Display
from ..monitoring.sinks.run_sinks import RunSinks

Item = TypeVar("Item")


class Reader(AsyncIterator[Item]):
    """The items of a feed, from now on until its end. ``at_end`` may raise the error that the iteration ends with."""

    def __init__(self, ended: bool, at_end: Callable[[], None]) -> None:
        self._items: deque[Item] = deque()
        self._ended = ended
        self._at_end = at_end
        self._changed = asyncio.Event()

    def put(self, item: Item) -> None:
        """Appends an item, called by the feed; a reader that waits for one wakes. Nothing bounds the number of them."""
        self._items.append(item)
        self._changed.set()

    def end(self) -> None:
        """Ends the iteration after the items that are left. May be called again."""
        self._ended = True
        self._changed.set()

    async def __anext__(self) -> Item:
        while not self._items:
            if self._ended:
                self._at_end()
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()


class Feed(Generic[Item]):
    """A reader that its user has dropped gets nothing more."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._ended = False
        self._readers: WeakSet[Reader[Item]] = WeakSet()

    def reader(self) -> Reader[Item]:
        """A new reader, of the items from now on. It ends at once if the feed has ended."""
        reader = Reader[Item](self._ended, self._at_end)
        self._readers.add(reader)
        return reader

    def put(self, item: Item) -> None:
        """Gives an item to each reader. Never waits."""
        for reader in self._readers:
            reader.put(item)

    def end(self) -> None:
        """Ends all readers, also those that are made later. May be called again."""
        self._ended = True
        for reader in self._readers:
            reader.end()


class Pulse:
    """Wakes all waiters at each change. A waiter takes ``next``, looks, and then waits for it: so it misses nothing."""

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def beat(self) -> None:
        """Wakes all waiters, and puts a new event in the place of ``next``."""
        self.next.set()
        self.next = asyncio.Event()


class Broadcast(Display):
    """Shows a run on ``display``, and gives its steps and events to readers too."""

    def __init__(self, display: Display, at_end: Callable[[], None]) -> None:
        self._display = display
        self.sinks: RunSinks | None = None
        """They get steps and events too."""
        self.steps = Feed[StepMetrics](at_end)
        self.events = Feed[RunEvent](at_end)
        self.changes = Pulse()
        self.last_step = 0
        self.last_phase = ""

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.__exit__(kind, error, trace)

    @property
    def wall_s(self) -> float:
        return self._display.wall_s

    def step(self, metrics: StepMetrics) -> None:
        self.steps.put(metrics)
        if self.sinks is not None:
            self.sinks.step(metrics)
        self.last_step = metrics.step
        self.changes.beat()
        self._display.step(metrics)

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        self.last_phase = text
        self.changes.beat()
        self._display.phase(text, done, total)

    def event(self, event: RunEvent) -> None:
        self.events.put(event)
        if self.sinks is not None:
            self.sinks.event(event)
        self.changes.beat()
        self._display.event(event)

    def warn(self, text: str, *, at_once: bool = False) -> None:
        self._display.warn(text, at_once=at_once)

    def note(self, text: str) -> None:
        self._display.note(text)

    def tick(self) -> None:
        self._display.tick()

    def end(self) -> None:
        """Ends the iterations of all readers."""
        self.steps.end()
        self.events.end()
