"""Values that are stored by reference: a reference to one, and to a whole column of them.

The store's client writes and reads this format, the store checks and journals it; no other module knows it.

A column of references is packed in runs, one for each run of rows with values in the same segment, of the same dtype
and number of dimensions, so that a batch is a few lists of numbers instead of many small objects:

    {"refs": [[segment, dtype, [offset, ...], [[size of dimension 0, ...], ...]], ...]}
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Any, Final, TypeGuard

import numpy as np

from ...transport.handle import DTYPE_BYTES
from ..errors import StoreError
from ..segments.segments import ByteRef

UTF8: Final = "utf8"
ITEM_BYTES: Final = {**DTYPE_BYTES, UTF8: 1}

Shape = tuple[int, ...]

ValueRef = tuple[str, int, int, str, Shape]
"""A value in a segment: segment, offset, size in bytes, dtype and shape of elements that are row-major and
little-endian. ``dtype``: a name of ``DTYPE_BYTES``, or ``utf8`` for a long string, whose shape is its number of bytes.

A plain tuple, of which there are several in each of perhaps a million rows: Python's garbage collector looks at every
object of a class again and again, and leaves tuples of numbers and strings alone.
"""

ColumnRefs = dict[str, Any]
"""A packed column of references, as above."""


def refs_of(cells: Iterable[Any]) -> list[ValueRef]:
    """The references among ``cells``."""
    return [cell for cell in cells if type(cell) is tuple]


def is_packed(column: Any) -> TypeGuard[ColumnRefs]:
    """True for a packed column, False for a list of cells."""
    return isinstance(column, dict)


def pack(values: Sequence[ValueRef]) -> ColumnRefs:
    """Packs references, at least one. Rows keep their order, so references to the same segment may be in several
    runs."""
    segments, offsets, _, dtypes, shapes = zip(*values, strict=True)
    if len({*segments}) == len({*dtypes}) == len({*map(len, shapes)}) == 1:  # one run, as in most columns
        sizes = list(zip(*shapes, strict=True)) if shapes[0] else []
        return {"refs": [[segments[0], dtypes[0], offsets, sizes]]}
    runs = [pack(list(run))["refs"][0] for _, run in groupby(values, _kind)]
    return {"refs": runs}


def _kind(value: ValueRef) -> tuple[str, str, int]:
    """Segment, dtype and number of dimensions: equal within a run."""
    return value[0], value[3], len(value[4])


def pack_column(cells: Sequence[Any]) -> Sequence[Any] | ColumnRefs:
    """A column as it is sent and journaled: packed if every cell is a reference."""
    return pack(cells) if set(map(type, cells)) == {tuple} else cells


def pack_flat(refs: Sequence[ByteRef], dtype: str) -> ColumnRefs:
    """Packs flat arrays of one dtype that were written together, and so lie in one segment; at least one."""
    item_bytes = ITEM_BYTES[dtype]
    segments, offsets, sizes = zip(*refs, strict=True)
    return {"refs": [[segments[0], dtype, offsets, [[size // item_bytes for size in sizes]]]]}


def unpack(column: ColumnRefs) -> list[ValueRef]:
    """Raises StoreError if ``column`` does not have the format above, has an unknown dtype or a negative number."""
    values: list[ValueRef] = []
    try:
        for segment, dtype, offsets, dimensions in column["refs"]:
            shapes = list(zip(*dimensions, strict=True)) if dimensions else [()] * len(offsets)
            for numbers in (offsets, *dimensions):
                if type(segment) is not str or set(map(type, numbers)) != {int} or min(numbers) < 0:
                    raise ValueError
            item_bytes = ITEM_BYTES[dtype]
            if len(dimensions) == 1:  # token lists: worth a shorter way
                sizes = [length * item_bytes for length in dimensions[0]]
            else:
                sizes = [math.prod(shape) * item_bytes for shape in shapes]
            names = repeat(segment, len(offsets)), repeat(dtype, len(offsets))
            values += zip(names[0], offsets, sizes, names[1], shapes, strict=True)
    except (KeyError, TypeError, ValueError):
        raise StoreError(
            "invalid packed column: {'refs': [[segment, dtype, offsets, dimensions], ...]} is wanted"
        ) from None
    return values


def segments(column: Any) -> Iterator[str]:
    """The segments of a column's references, packed or not."""
    if is_packed(column):
        return (run[0] for run in column["refs"])
    return (cell[0] for cell in column if is_ref(cell))


@dataclass(frozen=True, slots=True)
class Run:
    """References of one dtype that follow one another in a column."""

    dtype: str
    refs: list[ByteRef]
    shapes: Sequence[Shape]


def runs(column: Any) -> Iterator[Run]:
    """The references of a column as a reader gets it, packed or not, in the order of its rows."""
    if is_packed(column):
        for segment, dtype, offsets, dimensions in column["refs"]:
            shapes = list(zip(*dimensions, strict=True)) if dimensions else [()] * len(offsets)
            item_bytes = ITEM_BYTES[dtype]
            sizes = [math.prod(shape) * item_bytes for shape in shapes]
            yield Run(dtype, list(map(ByteRef, repeat(segment), offsets, sizes)), shapes)
    else:
        for cell in column:
            if is_ref(cell):
                segment, offset, size_bytes, dtype, shape = cell
                yield Run(dtype, [ByteRef(segment, offset, size_bytes)], [tuple(shape)])


def inline_array(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """An array, row-major and little-endian, as a cell that lies in the message itself."""
    return {"dtype": array.dtype.name, "shape": [*array.shape], "bytes": array.tobytes()}


def plain_cell(cell: Any) -> Any:
    """The value of a cell that lies in the message: an ``inline_array`` is an array again, read-only."""
    if not isinstance(cell, dict):
        return cell
    return np.frombuffer(cell["bytes"], cell["dtype"]).reshape(cell["shape"])


def is_ref(cell: Any) -> bool:
    """True for a reference that has come in a message, in which tuples become lists."""
    return isinstance(cell, list | tuple)
