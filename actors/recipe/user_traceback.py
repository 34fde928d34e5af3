"""The traceback of an error in a recipe's code, as its author reads it: their own lines, without the machinery's.

  File "my-recipe/workflow.py", line 12, in workflow
    turn = await agents["solver"].generate(prompt)
  ... 5 frames of flexmarl; FLEXMARL_TRACEBACK=full shows them
flexmarl.actors.errors.PromptTooLong: ...
"""

import asyncio
import importlib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ...core.base.texts import escaped, traceback_of
from ...core.errors import FlexmarlError

_MACHINERY: Final = {
    "flexmarl": Path(__file__).parents[2],
    "asyncio": Path(asyncio.__file__).parent,
    "importlib": Path(importlib.__file__).parent,
}
_FROZEN: Final = "<frozen importlib"
_HEADER: Final = "Traceback (most recent call last):\n"


def user_traceback(error: BaseException, folder: Path | None, *, whole: bool = False) -> str:
    """The frames of ``error`` from the first one of the user on, without those of flexmarl, asyncio and importlib
    behind it, whose number is in one line. Likewise for its causes and, for a group, its errors.

    ``folder``: the recipe's, whose files are the user's wherever it lies; None without one. ``whole``: all frames.

    An error that no line of the user is in keeps its frames, unless it is one of flexmarl's own, which says all in its
    text, or a SyntaxError, which names the line itself."""
    if whole:
        return traceback_of(error)
    report = traceback.TracebackException.from_exception(error)
    _fold(report, error, folder)
    return escaped("".join(report.format()).removeprefix(_HEADER))


def user_line(error: BaseException, folder: Path) -> str:
    """The innermost line of the recipe that ``error`` went through: ``workflow.py:12, in workflow: x = 1 / 0``; empty
    without one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(folder):
            return f"{file.relative_to(folder)}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def headline(kind: str, text: str, error: BaseException) -> str:
    """``kind: text``; for a group of errors, whose text names none of them, with the first one."""
    first = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    more = "" if first is error else f": {''.join(traceback.format_exception_only(first)).strip()}"
    return escaped(f"{kind}: {text}{more}")


class _Frames(traceback.StackSummary):
    """Frames, and behind them a line about those that are left out."""

    def __init__(self, frames: Sequence[traceback.FrameSummary], more: str) -> None:
        super().__init__(frames)
        self._more = more

    def format(self, **options: Any) -> list[str]:
        return [*super().format(**options), *([f"  {self._more}\n"] if self._more else [])]


def _fold(report: traceback.TracebackException, error: BaseException, folder: Path | None) -> None:
    """Leaves frames out in ``report``, which is of ``error``, and in those of its causes and parts."""
    report.stack = _folded_frames(report.stack, error, folder)
    # Its cause may be the answer of another process, whose text is in the error's own.
    if isinstance(error, FlexmarlError):
        report.__cause__ = report.__context__ = None
    for part, part_error in (
        (report.__cause__, error.__cause__),
        (report.__context__, error.__context__),
        *zip(report.exceptions or (), getattr(error, "exceptions", ()), strict=False),
    ):
        if part is not None and part_error is not None:
            _fold(part, part_error, folder)


def _folded_frames(
    frames: Sequence[traceback.FrameSummary], error: BaseException, folder: Path | None
) -> traceback.StackSummary:
    owners = [_owner(frame.filename, folder) for frame in frames]
    of_user = [n for n, frame in enumerate(frames) if _lies_in(folder, frame.filename)]
    of_others = [n for n, owner in enumerate(owners) if not owner]
    begin = min(of_user or of_others, default=None)
    if begin is None and not isinstance(error, FlexmarlError | SyntaxError):
        return _Frames(frames, "")
    if begin is None:
        return _Frames([], "")
    # Those before the first are the same for every error of a recipe, and are not mentioned.
    hidden = [owners[n] for n in range(begin, len(frames)) if owners[n]]
    noun = "frame" if len(hidden) == 1 else "frames"
    more = (
        f"... {len(hidden)} {noun} of {', '.join(dict.fromkeys(hidden))}; FLEXMARL_TRACEBACK=full shows them"
    )
    return _Frames([frames[n] for n in of_others if n >= begin], more if hidden else "")


def _owner(filename: str, folder: Path | None) -> str:
    """The part of the machinery that a file belongs to; empty for all other files."""
    if filename.startswith(_FROZEN):
        return "importlib"
    if _lies_in(folder, filename):
        return ""
    return next((name for name, place in _MACHINERY.items() if _lies_in(place, filename)), "")


def _lies_in(folder: Path | None, filename: str) -> bool:
    return folder is not None and Path(filename).is_relative_to(folder)
