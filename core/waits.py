"""Waits of actors, as plain data: shown to people when a program makes no progress."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that an actor waits for, or computes.

    ``text``: a clause that names the thing, and the part that has to act: ``3 turns at the endpoint http://...``.
    ``seconds``: it has lasted so long. ``limit``: the setting that ends it, with its value
    (``rollout.turn_timeout_s=600``); empty if nothing does. ``actor``: the actor that has to act, if it is one that
    lists waits itself: then this wait is a consequence, and is shown only if there is no cause.
    """

    text: str
    seconds: float
    limit: str = ""
    actor: str = ""


@dataclass(frozen=True, slots=True)
class ProcessWaits:
    """The waits of a process's actors. ``label``: of the process, for people. ``waits``: by actor; None: the process
    has not answered."""

    label: str
    waits: Mapping[str, Sequence[Wait]] | None


class OpenWaits:
    """The waits that an actor has open at present. ``with waits.open(text):`` around each ``await``."""

    def __init__(self) -> None:
        self._began: dict[int, tuple[float, str, str, str]] = {}
        self._numbers = 0

    @contextmanager
    def open(self, text: str, limit: str = "", actor: str = "", since: float | None = None) -> Iterator[None]:
        """See ``Wait``. ``since``: the loop's time at which it began; by default, now."""
        self._numbers += 1
        number = self._numbers
        began = asyncio.get_running_loop().time() if since is None else since
        self._began[number] = began, text, limit, actor
        try:
            yield
        finally:
            del self._began[number]

    def current(self) -> list[Wait]:
        """The oldest first; equal ones are counted, not repeated."""
        now = asyncio.get_running_loop().time()
        return group_waits(
            Wait(text, now - began, limit, actor) for began, text, limit, actor in self._began.values()
        )


def group_waits(waits: Iterable[Wait]) -> list[Wait]:
    """``waits`` with equal ones as one, which has the time of the oldest; the oldest first."""
    counts: dict[tuple[str, str, str], list[float]] = {}
    for wait in waits:
        counts.setdefault((wait.text, wait.limit, wait.actor), []).append(wait.seconds)
    distinct = [
        Wait(text if len(seconds) == 1 else f"{text} ({len(seconds)} times)", max(seconds), limit, actor)
        for (text, limit, actor), seconds in counts.items()
    ]
    return sorted(distinct, key=lambda wait: -wait.seconds)
