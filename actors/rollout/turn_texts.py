"""The texts of turns as they come, for the workflows that asked for them."""

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

from ..errors import RecipeError
from ..messages import Generation
from ..workflow import OnText


class TurnText:
    """The text of one turn so far. ``on_text`` is the workflow's: an error of it ends the turn, and is raised by it."""

    def __init__(self, on_text: OnText) -> None:
        """Raises RecipeError if ``on_text`` can't be called, or would have to be awaited."""
        if not callable(on_text) or inspect.iscoroutinefunction(on_text):
            raise RecipeError(f"on_text={on_text!r}: it must be a plain function of the text so far")
        self._on_text = on_text
        self._text = ""
        self._has_shown = False
        self._answer: asyncio.Future[Generation] | None = None
        self._error: Exception | None = None

    async def listen(self, call: Awaitable[Generation]) -> Generation:
        """The answer of an instance, while ``take`` gets its parts."""
        self._answer = asyncio.ensure_future(call)
        try:
            return await self._answer
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._answer = None

    def take(self, start: int, text: str) -> None:
        """A part from the character ``start`` on. One behind a part that was lost is dropped: the answer has all."""
        if self._answer is None or start > len(self._text) or self._error is not None:
            return
        try:
            self.show(self._text[:start] + text)
        except Exception as error:  # noqa: BLE001  # of the workflow's function: raised by `listen`
            self._error = error
            self._answer.cancel()

    def show(self, text: str) -> None:
        """Calls ``on_text`` if the text has changed, and the first time: an answer may be empty."""
        if text != self._text or not self._has_shown:
            self._text, self._has_shown = text, True
            self._on_text(text)


class TurnTexts:
    """The turns whose text is wanted. Each part of a turn has a number of its own: what an instance that was lost sends
    late belongs to no turn."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._streams: dict[int, TurnText] = {}

    @contextmanager
    def opened(self, text: TurnText) -> Iterator[int]:
        """The number of a new stream, for as long as it is entered."""
        number = next(self._numbers)
        self._streams[number] = text
        try:
            yield number
        finally:
            del self._streams[number]

    def take(self, stream: int, start: int, text: str) -> None:
        """Passes a part of a stream's text, from the character ``start`` on, to its turn; drops it if the stream has
        ended."""
        if (turn := self._streams.get(stream)) is not None:
            turn.take(start, text)
