"""Values in the blob arena: what refers to one, and to a whole column of them.

A column is packed as pieces, one for each run of rows in the same segment and of the same dtype, so that a batch is
a few lists of numbers instead of many small objects:

    {"refs": [[segment, dtype, [offset, ...], [[size of dimension 0, ...], ...]], ...]}
"""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, repeat
from typing import Any, Final

from ..transport.handle import DTYPE_BYTES
from .errors import StoreError

UTF8: Final = "utf8"
ITEM_BYTES: Final = {**DTYPE_BYTES, UTF8: 1}

ValueRef = tuple[str, int, int, str, tuple[int, ...]]
"""A value in the blob arena: segment, offset, size in bytes, dtype and shape of elements that are row-major and
little-endian. ``dtype``: a name of ``DTYPE_BYTES``, or ``utf8`` for a long string, whose shape is its number of bytes.

A plain tuple, of which there are several in each of perhaps a million rows: Python's garbage collector looks at every
object of a class again and again, and leaves tuples of numbers and strings alone.
"""

ColumnRefs = dict[str, Any]


def refs_of(cells: Iterable[Any]) -> list[ValueRef]:
    """Those of ``cells`` that lie in the blob arena."""
    return [cell for cell in cells if type(cell) is tuple]


def pack(values: Iterable[ValueRef]) -> ColumnRefs:
    pieces = []
    for (segment, dtype, dimensions), run in groupby(
        values, lambda value: (value[0], value[3], len(value[4]))
    ):
        _, offsets, _, _, shapes = zip(*run, strict=True)
        pieces.append([segment, dtype, offsets, list(zip(*shapes, strict=True)) if dimensions else []])
    return {"refs": pieces}


def packed(cells: Sequence[Any]) -> Sequence[Any] | ColumnRefs:
    """A column as it is sent and journaled: packed where all of it is ValueRef."""
    return pack(cells) if set(map(type, cells)) == {tuple} else cells


def unpack(column: ColumnRefs) -> list[ValueRef]:
    """Raises StoreError where ``column`` is not built as described, has an unknown dtype or a negative number."""
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
            "a packed column is wrong: {'refs': [[segment, dtype, offsets, dimensions], ...]} is wanted"
        ) from None
    return values
