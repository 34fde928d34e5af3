"""A process of a worker's pool: ``python -P -m flexmarl.actors.environments.process_main PARENT``.

Standard input brings the search path and the recipe's folder, and then calls, one after the other; standard output
takes their results. The output of the functions goes to standard error. The process ends with its parent, also in the
middle of a call that holds Python's lock (prctl(2), PR_SET_PDEATHSIG).
"""

import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final

from ...core.base.texts import text_of
from ..recipe.recipe import Recipe, RecipeConfig
from ..recipe.user_traceback import user_traceback
from .process_calls import LENGTH, arguments_of, frame, message_of

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Answers calls until standard input ends. Its argument is the id of the process that has started this one; it
    returns at once if that is not the parent any more."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it ended before that
        return
    # A function that prints or reads standard input must not disturb the frames, and a library in C may use the
    # descriptors themselves: they are replaced, not only sys.stdin and sys.stdout.
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    init = _read(calls)
    sys.path += [path for path in init["paths"] if path not in sys.path]
    answers.write(frame(_load_recipe(init["recipe"])))
    answers.flush()
    folder = Path(init["recipe"]).resolve() if init["recipe"] else None
    while (call := _read(calls)) is not None:
        answers.write(answer_call(call, folder, whole_tracebacks=init["whole_tracebacks"]))
        answers.flush()


def _load_recipe(folder: str) -> str:
    """Makes the recipe's module importable. Returns the problem, or an empty text."""
    try:
        if folder:
            Recipe(RecipeConfig(folder=folder, data={}, seed=0))
    except Exception as error:  # noqa: BLE001  # of the recipe's code: the caller raises it
        return str(error)
    return ""


def _read(stream: BinaryIO) -> Any:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return message_of(stream.read(LENGTH.unpack(head)[0]))


def answer_call(call: Any, folder: Path | None, *, whole_tracebacks: bool) -> bytes:
    """Calls a function. Returns the frame of its result, or of the error that it raised. ``folder``: the recipe's, as
    for ``user_traceback``."""
    try:
        target: Any = importlib.import_module(call["module"])
        for part in call["name"].split("."):
            target = getattr(target, part)
        return frame({"result": target(*arguments_of(target, call["args"]))})
    except BaseException as error:  # noqa: BLE001  # of the caller's function: the caller raises it
        frames = user_traceback(error, folder, whole=whole_tracebacks)
        return frame({"kind": type(error).__name__, "text": text_of(error), "traceback": frames})


if __name__ == "__main__":
    main()
