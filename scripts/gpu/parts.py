"""The parts of a test: an error in one is a failed check of its own, and the next one runs."""

import sys
import traceback
from collections.abc import Iterator
from typing import Final

from .checks import Check, LeftOut

_WORDS: Final = 400


def run_parts(**parts: Iterator[Check]) -> Iterator[Check]:
    """The checks of all parts, each named after its part; underscores in the name of a part are spaces."""
    for name, checks in parts.items():
        yield from run_part(name.replace("_", " "), checks)


def run_part(name: str, checks: Iterator[Check]) -> Iterator[Check]:
    """The checks of one part; an error becomes the check ``NAME: ended``."""
    try:
        yield from checks
    except LeftOut as reason:
        yield Check(f"{name}: left out", str(reason))
    except Exception as error:  # noqa: BLE001  # any error of a part is a failed check
        traceback.print_exc()
        sys.stderr.flush()
        text = f"{type(error).__name__}: {error}"[:_WORDS]
        yield Check(f"{name}: ended", text, "", "without an error", False)
