"""Finds the place of a forgotten ``await``: a coroutine where its result was meant. Pure."""

import asyncio
import inspect
import re
from typing import Final

_NAMED: Final = re.compile(r"'(coroutine|_asyncio\.(Task|Future)|_GatheringFuture)'")
_HINT: Final = "is `await` missing?"


def await_hint(value: object) -> str:
    """``"; is `await` missing?"`` for a value that has to be awaited; empty for all others."""
    return f"; {_HINT}" if inspect.iscoroutine(value) or asyncio.isfuture(value) else ""


def await_hint_of(error: BaseException) -> str:
    """The same for an error that Python raised because of such a value."""
    if isinstance(error, AttributeError | TypeError) and _NAMED.search(str(error)):
        return f"; {_HINT}"
    return ""
