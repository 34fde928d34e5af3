"""Columns that a run declares for an agent's samples, beyond those that training needs.

    agents.solver.columns: {difficulty: {type: float}, plan: {type: tokens}, judged: {type: float, required: true,
                            written_by: external}}

A workflow fills them with ``Turn.write``, an external writer with ``StoreApi.write``.
"""

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, Literal

import numpy as np
from pydantic import model_validator

from ...transport.handle import DTYPE_BYTES
from ..config_base import Config, Seconds
from ..errors import ConfigError

# The range that SQLite and MessagePack hold without loss.
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
MAX_STRING: Final = 256
"""Characters of a string that lies in its row; a longer one is stored by reference, with dtype ``utf8``."""

REWARD_COLUMN: Final = "reward"
"""The column of an agent's reward. If it is declared, as required and ``written_by: external``, a program outside the
run gives the rewards, and groups wait for them."""

OFFER_KEY: Final = "@offer"
"""Beside the columns of samples that wait for their reward, and of the rewards: the names of their offers. No column
has this name."""

_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_TOKEN: Final = np.iinfo(np.int32)

META: Final = (
    "agent",
    "sample_id",
    "step",
    "group",
    "query",
    "turn",
    "trajectory",
    "policy_version",
    "query_position",
    "status",
    "optimizer_step",
)
"""Columns of every row, besides ``reward``. A put gives ``sample_id``, ``policy_version`` and, if the order of the
queries matters, ``query_position`` (the number of the query's draw); the store knows the others."""


class Column(Config):
    """A column that the run declares. A row is READY when all ``required`` columns of its table are written.

    Tokens are int32 of one dimension. If the workflow leaves out a required column, the trajectory fails."""

    type: Literal["float", "int", "bool", "str", "tokens", "tensor"]
    """Type of the column's values."""
    required: bool = False
    """`true`: a sample without a value is not trained."""
    dtype: str | None = None
    """Type of a tensor's numbers. `null`: any."""
    shape: tuple[int | None, ...] | None = None
    """Shape of a tensor. `null`: any; a dimension that is `null` has any size."""
    written_by: Literal["workflow", "external"] = "workflow"
    """Writer of the column: the `workflow`, or a process outside the run (`external`)."""
    timeout_s: Seconds = 600.0
    """Time that training waits for a required `external` column before the run fails; of `reward`, that a trajectory
    waits before it fails."""

    @model_validator(mode="after")
    def _only_tensors_have_shapes(self) -> "Column":
        if self.type != "tensor" and (self.dtype, self.shape) != (None, None):
            raise ValueError(f"a {self.type} has no dtype and shape to choose; a tensor has")
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; known: {', '.join(DTYPE_BYTES)}")
        if any(size is not None and size < 0 for size in self.shape or ()):
            raise ValueError(f"negative size in shape {self.shape}")
        return self

    @property
    def is_by_reference(self) -> bool:
        """True if its values lie in segments of the store and a row has references to them; False if they lie in the
        row."""
        return self.type in ("tokens", "tensor")

    @property
    def awaited(self) -> bool:
        """True if training waits for an external writer."""
        return self.required and self.written_by == "external"

    def takes(self, dtype: str, shape: Sequence[int]) -> bool:
        """True if an array of this dtype and shape is a value of the column."""
        if self.type == "tokens":
            return dtype == "int32" and len(shape) == 1
        if self.type != "tensor" or dtype not in DTYPE_BYTES or self.dtype not in (None, dtype):
            return False
        return self.shape is None or (
            len(shape) == len(self.shape)
            and all(expected in (None, size) for expected, size in zip(self.shape, shape, strict=True))
        )

    def __str__(self) -> str:
        """``float``, or ``tensor float32 [any, 8]``."""
        shape = None if self.shape is None else str(list(self.shape)).replace("None", "any")
        return " ".join(filter(None, (self.type, self.dtype, shape)))


Columns = Mapping[str, Column]
"""The declared columns of one agent, by name."""


def outside_reward(columns: Columns) -> Column | None:
    """The column by which a program outside the run gives the agent's rewards; None if the workflow gives them."""
    column = columns.get(REWARD_COLUMN)
    return column if column is not None and column.awaited else None


def check_names(columns: Columns, reserved: Sequence[str] = ()) -> None:
    """Raises ConfigError for a name that is not an identifier in lower case, is one of ``META`` or is ``reserved``."""
    for name in columns:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"column {name!r}: a name is up to 63 of a-z, 0-9 and _, not beginning with 0-9"
            )
        if name in META or name in reserved:
            raise ConfigError(f"column {name!r}: every table has it already; choose another name")


def common_types(columns: Mapping[str, Columns]) -> dict[str, str]:
    """Type by name of all columns. Raises ConfigError if two agents give one name different types."""
    types: dict[str, str] = {}
    for agent, agent_columns in columns.items():
        for name, column in agent_columns.items():
            if types.setdefault(name, column.type) != column.type:
                raise ConfigError(
                    f"column {name!r} is {column.type} for agent {agent!r} and {types[name]} for another: "
                    "choose one type or two names"
                )
    return types


# --------------------------------------------------------------------------- values that a workflow writes


def checked_value(column: Column, value: Any) -> float | int | bool | str | np.ndarray[Any, Any]:
    """Converts a workflow's ``value`` to the column's type: a plain number or string, or a new array.

    NumPy's numbers count as numbers; tokens may be any flat sequence of integers, tensors NumPy's or torch's. Raises
    ValueError; its text names the values that the column takes.
    """
    match column.type:
        case "float":
            return _float(value)
        case "int":
            return _int(value)
        case "bool":
            if isinstance(value, bool | np.bool_):
                return bool(value)
            raise ValueError("a bool")
        case "str":
            return _text(value)
        case "tokens":
            return _tokens(value)
        case "tensor":
            return _tensor(column, value)


def _int(value: Any) -> int:
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = int(value)
        if INT_MIN <= number <= INT_MAX:
            return number
    raise ValueError("an int of 64 bits")


def _float(value: Any) -> float:
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise ValueError("a finite float")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("a str without lone surrogates") from None
    return str(value)


def _tokens(value: Any) -> np.ndarray[Any, Any]:
    expected = "tokens: a flat sequence of ints of 32 bits"
    try:
        tokens = np.asarray(_off_device(value))
    except (TypeError, ValueError):  # a sequence of sequences of different lengths, say
        raise ValueError(expected) from None
    if tokens.ndim == 1 and not tokens.size and not isinstance(value, str | bytes):
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(expected)
    if tokens.min() < _TOKEN.min or tokens.max() > _TOKEN.max:
        raise ValueError(expected)
    return tokens.astype("<i4")


def _tensor(column: Column, value: Any) -> np.ndarray[Any, Any]:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise ValueError(f"a {column}, as an array of NumPy or torch")
    try:
        array = np.asarray(_off_device(value))
    except TypeError:
        raise ValueError(f"a {column}; NumPy has no {value.dtype}: convert it") from None
    if not column.takes(array.dtype.name, array.shape):
        raise ValueError(f"a {column}; this is {array.dtype.name} {list(array.shape)}")
    return np.array(array, array.dtype.newbyteorder("<"), order="C")


def _off_device(value: Any) -> Any:
    """Moves a tensor of torch, which is not imported for this, to memory that NumPy can read."""
    return value.detach().cpu() if hasattr(value, "detach") else value
