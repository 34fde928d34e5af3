"""The declared columns of one turn's sample, as the workflow writes them."""

from collections.abc import Callable, Mapping
from typing import Any

from ..columns.declared_columns import Columns, checked_value
from ..errors import InvalidColumn, RecipeError


class TurnColumns:
    """``values``: by column, in the form of ``Sample.columns``. Each is written once."""

    def __init__(self, agent: str, sample_id: str, declared: Columns, ended: Callable[[], bool]) -> None:
        """``ended``: says if the turn's trajectory has ended."""
        self.values: dict[str, Any] = {}
        self._agent = agent
        self._sample_id = sample_id
        self._declared = declared
        self._ended = ended

    def write(self, columns: Mapping[str, Any]) -> None:
        """All of them or none. Raises what ``Turn.write`` raises."""
        if self._ended():
            raise RecipeError(
                f"agent {self._agent}: {', '.join(columns)} of turn {self._sample_id} was written after its workflow "
                "had returned: write before that, or from outside of the run (written_by: external)"
            )
        self.values |= {name: self._check(name, value) for name, value in columns.items()}

    def missing(self) -> list[str]:
        """The required columns that the workflow has not written yet."""
        return [
            name
            for name, column in self._declared.items()
            if column.required and not column.awaited and name not in self.values
        ]

    def _check(self, name: str, value: Any) -> Any:
        column = self._declared.get(name)
        if column is None:
            raise RecipeError(
                f"agent {self._agent} has no column {name!r} (agents.{self._agent}.columns in the config); "
                f"{self._describe_columns()}"
            )
        if column.written_by != "workflow":
            raise RecipeError(
                f"agent {self._agent}: column {name} is a {column} that the workflow does not write: "
                f"agents.{self._agent}.columns.{name}.written_by={column.written_by}; {self._describe_columns()}"
            )
        if name in self.values:
            raise InvalidColumn(
                f"agent {self._agent}: column {name}, a {column}, of turn {self._sample_id} was written already; "
                f"{self._describe_columns()}"
            )
        try:
            return checked_value(column, value)
        except ValueError as wanted:
            shown = repr(value)
            shown = shown if len(shown) <= 120 else f"{shown[:120]}..."
            raise InvalidColumn(
                f"agent {self._agent}: column {name} wants {wanted}, not {shown} ({type(value).__name__}), for turn "
                f"{self._sample_id}; {self._describe_columns()}"
            ) from None

    def _describe_columns(self) -> str:
        names = [
            f"{name} ({column})" for name, column in self._declared.items() if column.written_by == "workflow"
        ]
        return f"the workflow may write: {', '.join(names) or 'none'}"
