"""Conditions on a number, as people write them: ``12``, ``<0.2``, ``>=0.5``, ``10-20``. Pure."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ...errors import InvalidCondition

_NUMBER: Final = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_COMPARISON: Final = re.compile(rf"\s*(<=|>=|!=|<|>|==?)?\s*{_NUMBER}\s*")
_RANGE: Final = re.compile(rf"\s*{_NUMBER}\s*(?:-|\.\.)\s*{_NUMBER}\s*")
_HOLDS: Final[Mapping[str, Callable[..., bool]]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "BETWEEN": lambda number, least, most: least <= number <= most,
}  # fmt: skip
"""By the first word of ``Condition.sql``."""


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

    def holds(self, number: float) -> bool:
        """True if it is true of ``number``."""
        return bool(_HOLDS[self.sql.split()[0]](number, *self.values))


_OF_A_NAME: Final = re.compile(r"\s*([^<>=!]*?)\s*([<>=!].*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FigureCondition:
    """A condition on a figure of trajectories: on the metric ``name``, or on their ``reward``."""

    name: str
    condition: Condition

    @classmethod
    def of(cls, text: str) -> "FigureCondition":
        """Reads ``accuracy>=1``, ``reward>0.8``, or ``>=0.8`` of the reward. Raises InvalidCondition."""
        match = _OF_A_NAME.fullmatch(text)
        try:
            return cls((match[1] if match else "") or "reward", Condition.of(match[2] if match else text))
        except InvalidCondition:
            raise InvalidCondition(text, "'reward>=1', 'accuracy=1' or '>0.8'") from None

    def __str__(self) -> str:
        return f"{self.name} {self.condition.sql.replace('?', '{:g}')}".format(*self.condition.values)
