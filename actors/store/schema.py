"""The columns of a table's rows, as a run declares them for an agent, and the check of every value.

A small value lies in the row (float, int, bool, short string). Tokens, tensors and long strings lie in a segment, and
the row holds a reference: type-aware hybrid storage.

Values come by column, one list for many rows, and are checked by column: loops over values run in C.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from ...transport.handle import DTYPE_BYTES
from ..columns.column_refs import UTF8, ColumnRefs, ValueRef, unpack
from ..columns.declared_columns import INT_MAX, INT_MIN, MAX_STRING, Column, check_names
from ..errors import ConfigError, StoreError

Columns = Mapping[str, Sequence[Any] | ColumnRefs]
"""Rows by column: name -> one value for each row, all lists equally long; columns of references may come packed."""

CheckedColumns = dict[str, Sequence[Any]]
"""Rows by column, as cells."""

Cell = float | int | bool | str | ValueRef | None
"""A value as a row holds it; None: not written (yet), or a reference that was freed when the row was consumed."""

REWARD: Final = Column(type="float", required=True)


class Schema:
    """The declared columns of one agent's table; ``reward`` is among them, as ``REWARD`` unless declared.

    Raises ConfigError for a name that ``check_names`` refuses, and for a ``reward`` that is not a float.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        check_names(columns)
        self.columns: dict[str, Column] = {"reward": REWARD, **columns}
        if self.columns["reward"].type != "float":
            raise ConfigError(f"column 'reward' is a float, not {self.columns['reward'].type}")
        self.names = tuple(self.columns)
        self.index = {name: place for place, name in enumerate(self.names)}
        self.required = tuple(self.index[name] for name, column in self.columns.items() if column.required)
        self.awaited = {name: column for name, column in columns.items() if column.awaited}
        """Columns that rows wait for after they were put."""

    def is_complete(self, cells: Sequence[Cell]) -> bool:
        """True if all required columns are written."""
        return all(cells[place] is not None for place in self.required)

    def lacking(self, cells: Sequence[Cell]) -> list[str]:
        """The required columns that are not written."""
        return [self.names[place] for place in self.required if cells[place] is None]

    def check(self, table: str, ids: Sequence[str], columns: Columns) -> CheckedColumns:
        """``columns`` as cells: ints in float columns become floats; references arrive as lists, or packed, and become
        ``ValueRef``. None in a column that is not required: not written.

        ``ids``: the sample ids of the rows, for error texts. Raises StoreError for the first column that is unknown,
        not as long as ``ids``, or has an invalid value.
        """
        checked: CheckedColumns = {}
        for name, given in columns.items():
            column = self.columns.get(name)
            if column is None:
                known = ", ".join(self.columns)
                raise StoreError(f"table {table}: unknown column {name!r}; there are: {known}")
            values = unpack(given) if isinstance(given, dict) else given
            if len(values) != len(ids):
                raise StoreError(f"table {table}: column {name} has {len(values)} values for {len(ids)} rows")
            try:
                checked[name] = (_cells_of if isinstance(given, dict) else _cells_or_none)(column, values)
            except _Refused:
                raise StoreError(_first_refused(table, name, column, ids, values)) from None
        return checked

    def restore(self, columns: Columns) -> CheckedColumns:
        """The cells of a record of the journal: references become ``ValueRef`` again. Raises StoreError for an unknown
        column."""
        if unknown := columns.keys() - self.columns.keys():
            raise StoreError(f"unknown column {sorted(unknown)[0]!r}; there are: {', '.join(self.columns)}")
        return {
            name: unpack(values) if isinstance(values, dict) else list(map(_restore_cell, values))
            for name, values in columns.items()
        }


def _restore_cell(value: Any) -> Cell:
    if type(value) is not list:
        return value  # type: ignore[no-any-return]  # a short string, or None
    *place, shape = value
    return (*place, tuple(shape))


# --------------------------------------------------------------------------- the check of values, by column type


class _Refused(Exception):
    """Its text names the values that the column takes."""


def _first_refused(table: str, name: str, column: Column, ids: Sequence[str], values: Sequence[Any]) -> str:
    for sample_id, value in zip(ids, values, strict=True):
        try:
            _cells_or_none(column, [value])
        except _Refused as refused:
            shown = repr(value) if len(repr(value)) <= 120 else f"{repr(value)[:120]}..."
            return f"table {table}: sample {sample_id}: column {name} wants {refused}, not {shown}"
    raise AssertionError("a value of a refused column is refused alone too")


def _cells_or_none(column: Column, values: Sequence[Any]) -> list[Cell]:
    if column.required or None not in values:
        return _cells(column, values)
    cells = iter(_cells(column, [value for value in values if value is not None]))
    return [None if value is None else next(cells) for value in values]


def _cells(column: Column, values: Sequence[Any]) -> list[Cell]:
    return _CHECKS[column.type](column, values) if values else []


def _floats(column: Column, values: Sequence[Any]) -> list[Cell]:
    if set(map(type, values)) <= {float, int}:
        try:
            numbers = list(map(float, values))
        except OverflowError:
            raise _Refused("a finite float") from None
        # A finite sum has finite summands; finite summands may have an infinite sum.
        if math.isfinite(sum(numbers)) or all(map(math.isfinite, numbers)):
            return [*numbers]
    raise _Refused("a finite float")


def _ints(column: Column, values: Sequence[Any]) -> list[Cell]:
    if set(map(type, values)) == {int} and min(values) >= INT_MIN and max(values) <= INT_MAX:
        return list(values)
    raise _Refused("an int of 64 bits")


def _bools(column: Column, values: Sequence[Any]) -> list[Cell]:
    if set(map(type, values)) == {bool}:
        return list(values)
    raise _Refused("a bool")


def _strings(column: Column, values: Sequence[Any]) -> list[Cell]:
    inline = [value for value in values if type(value) is str]
    if inline and max(map(len, inline)) > MAX_STRING:
        raise _Refused(f"a string of up to {MAX_STRING} characters, or a reference to a longer one")
    if len(inline) == len(values):
        return [*inline]
    refs = iter(_refs(column, [value for value in values if type(value) is not str]))
    return [value if type(value) is str else next(refs) for value in values]


def _refs(column: Column, values: Sequence[Any]) -> list[Cell]:
    try:
        segments, offsets, sizes, dtypes, shapes = zip(*values, strict=True)
        cells: list[Any] = list(zip(segments, offsets, sizes, dtypes, map(tuple, shapes), strict=True))
        fits = (
            set(map(type, segments)) | set(map(type, dtypes)) == {str}
            and set(map(type, offsets)) | set(map(type, sizes)) == {int}
            and set(map(type, chain.from_iterable(shapes))) <= {int}
            and min(offsets) >= 0
            and _describe(column, cells)
        )
    except (TypeError, ValueError):  # not a reference
        fits = False
    if not fits:
        raise _Refused(_wanted_ref(column))
    return cells


def _cells_of(column: Column, values: Sequence[ValueRef]) -> list[Cell]:
    """The cells of a packed column, which ``unpack`` has checked in part."""
    if (column.is_by_reference or column.type == "str") and _describe(column, values):
        return [*values]
    raise _Refused(_wanted_ref(column))


def _describe(column: Column, values: Sequence[ValueRef]) -> bool:
    return all(_describes(column, *what) for what in {value[2:] for value in values})


def _describes(column: Column, size_bytes: int, dtype: str, shape: tuple[Any, ...]) -> bool:
    """True if a reference to this size, dtype and shape is a value of the column."""
    if min(shape, default=0) < 0:
        return False
    if column.type == "str":
        return dtype == UTF8 and shape == (size_bytes,)
    if dtype not in DTYPE_BYTES or math.prod(shape) * DTYPE_BYTES[dtype] != size_bytes:
        return False
    return column.takes(dtype, shape)


def _wanted_ref(column: Column) -> str:
    if not column.is_by_reference and column.type != "str":
        return f"values of type {column.type}"
    if column.type == "str":
        return f"a string, or a reference (segment, offset, size_bytes, {UTF8!r}, [size_bytes])"
    if column.type == "tokens":
        what = "int32 of one dimension"
    else:
        dims = "any shape" if column.shape is None else f"shape {list(column.shape)}".replace("None", "any")
        what = f"{column.dtype or 'any dtype'} of {dims}"
    return f"a reference (segment, offset, size_bytes, dtype, shape) to {what}"


_CHECKS: Final[dict[str, Callable[[Column, Sequence[Any]], list[Cell]]]] = {
    "float": _floats,
    "int": _ints,
    "bool": _bools,
    "str": _strings,
    "tokens": _refs,
    "tensor": _refs,
}
