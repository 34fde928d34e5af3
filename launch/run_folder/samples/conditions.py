"""Conditions on a number, as people write them: ``12``, ``<0.2``, ``>=0.5``, ``10-20``. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from ...errors import InvalidCondition

_NUMBER: Final = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_COMPARISON: Final = re.compile(rf"\s*(<=|>=|!=|<|>|==?)?\s*{_NUMBER}\s*")
_RANGE: Final = re.compile(rf"\s*{_NUMBER}\s*(?:-|\.\.)\s*{_NUMBER}\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """``sql``: with a question mark for each of ``values``, and the column in front."""

    sql: str
    values: tuple[float, ...]

    @classmethod
    def of(cls, what: "str | float") -> "Condition":
        """Raises InvalidCondition."""
        if isinstance(what, int | float):
            return cls("= ?", (what,))
        if (match := _COMPARISON.fullmatch(what)) is not None:
            return cls(f"{match[1] or '='} ?", (float(match[2]),))
        if (match := _RANGE.fullmatch(what)) is not None:
            return cls("BETWEEN ? AND ?", (float(match[1]), float(match[2])))
        raise InvalidCondition(what)
