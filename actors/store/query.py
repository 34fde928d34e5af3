"""SQL expressions over the rows, as users write them.

    reward > 0.5 and agent = 'checker'
    group = '12:q7' and reward < (select avg(reward) from samples where group = '12:q7')

The rows are copied into a table ``samples`` of an SQLite database in memory, made for the one query. The expression
comes from any peer of the store, so it can read that table and call harmless functions, and nothing else; its time, the
length of its values and the number of its rows are limited.
"""

import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..errors import SelectTimeout, StoreError
from ..messages import Selection

_NUMBERS: Final = ("abs", "avg", "count", "max", "min", "round", "sign", "sum", "total")
_TEXT: Final = (
    "glob",
    "instr",
    "length",
    "like",
    "lower",
    "ltrim",
    "rtrim",
    "substr",
    "substring",
    "trim",
    "upper",
)
_FUNCTIONS: Final = frozenset((*_NUMBERS, *_TEXT, "coalesce", "ifnull", "iif", "nullif", "typeof"))
_EXPRESSION_LIMIT: Final = 10_000
# These two bound the time of one step of SQLite, within which it can't be interrupted, to about 0.1 s.
_VALUE_LIMIT_BYTES: Final = 2**16
_PATTERN_LIMIT_BYTES: Final = 256
_STEPS_PER_CHECK: Final = 10_000
# Words of an expression's syntax. A column of such a name must be quoted in the expression.
_SYNTAX: Final = frozenset((
    "all", "and", "as", "asc", "between", "by", "case", "cast", "collate", "desc", "distinct", "else", "end", "escape",
    "except", "exists", "from", "glob", "in", "intersect", "is", "isnull", "like", "limit", "not", "notnull", "null",
    "offset", "on", "or", "select", "then", "union", "using", "when", "where",
))  # fmt: skip
# String literals, which are not changed; quoted and bare names.
_WORD: Final = re.compile(r"""('(?:[^']|'')*')|"((?:[^"]|"")*)"|([A-Za-z_]\w*)""")


def select(
    columns: Mapping[str, str],
    rows: Sequence[tuple[Any, ...]],
    where: str,
    *,
    limit: int = 1000,
    timeout_s: float = 5.0,
    is_given_up: Callable[[], bool] = lambda: False,
) -> Selection:
    """The first ``limit`` of ``rows`` (in their order) for which the expression ``where`` is true; of all rows if it is
    empty.

    ``columns``: type by name (``float``, ``int``, ``bool``, ``str``), in the order of each row's values. Takes about
    3 us a row, ``timeout_s`` at most: call it in a thread, with rows that do not change meanwhile. ``is_given_up``:
    asked now and then; if it returns True, no one needs the result.

    Raises StoreError for an expression that is invalid or not allowed, SelectTimeout if it takes too long or was given
    up.
    """
    if len(where) > _EXPRESSION_LIMIT:
        raise StoreError(f"an expression of {len(where)} characters is over the limit of {_EXPRESSION_LIMIT}")
    deadline = time.monotonic() + timeout_s
    # On lines of their own: a comment at the end must not swallow the parenthesis.
    condition = f"(\n{_quote_columns(where, columns) if where.strip() else '1'}\n)"
    database = sqlite3.connect(":memory:", isolation_level=None)
    try:
        database.set_progress_handler(lambda: time.monotonic() > deadline or is_given_up(), _STEPS_PER_CHECK)
        _fill(database, columns, rows)
        _lock(database)
        (total,) = database.execute(f"SELECT count(*) FROM samples WHERE {condition}").fetchone()
        found = database.execute(
            f"SELECT * FROM samples WHERE {condition} ORDER BY rowid LIMIT {limit:d}"
        ).fetchall()
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        if str(error) == "interrupted":
            raise SelectTimeout(where, timeout_s) from error
        raise StoreError(_explain(str(error), where, columns)) from error
    finally:
        database.close()
    bools = [name for name, kind in columns.items() if kind == "bool"]
    plain = [dict(zip(columns, row, strict=True)) for row in found]
    for row in plain:
        row.update({name: bool(row[name]) for name in bools if row[name] is not None})
    return Selection(plain, total)


def _fill(database: sqlite3.Connection, columns: Mapping[str, str], rows: Sequence[tuple[Any, ...]]) -> None:
    names = ", ".join(f'"{name}"' for name in columns)
    database.execute("BEGIN")
    database.execute(f"CREATE TABLE samples ({names})")
    database.executemany(f"INSERT INTO samples VALUES ({', '.join('?' * len(columns))})", rows)
    database.execute("COMMIT")


def _lock(database: sqlite3.Connection) -> None:
    """Restricts the connection to reading ``samples``."""
    database.execute("PRAGMA query_only = 1")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_LIMIT_BYTES)
    database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _PATTERN_LIMIT_BYTES)
    database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    database.set_authorizer(_authorize)


def _authorize(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    allowed = (
        action == sqlite3.SQLITE_SELECT
        or (action == sqlite3.SQLITE_READ and first == "samples")
        or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _quote_columns(where: str, columns: Mapping[str, str]) -> str:
    """``where`` with the names of columns quoted, as some (``group``, say) are words of SQL. Raises StoreError for a
    name in double quotes that is not a column: SQLite would take it for a string."""

    def quote(match: re.Match[str]) -> str:
        _, quoted, word = match.groups()
        if quoted is not None and quoted.lower() not in columns:
            raise StoreError(
                f"there is no column \"{quoted}\" (text is quoted as '{quoted}'); {_name_columns(columns)}"
            )
        is_column = word is not None and word.lower() in columns and word.lower() not in _SYNTAX
        return f'"{word}"' if is_column else match[0]

    return _WORD.sub(quote, where)


def _name_columns(columns: Mapping[str, str]) -> str:
    return f"there are: {', '.join(columns)}"


def _explain(error: str, where: str, columns: Mapping[str, str]) -> str:
    if error.startswith("no such column: "):
        return f"there is no column {error.removeprefix('no such column: ')}; {_name_columns(columns)}"
    if any(sign in error for sign in ("authoriz", "prohibited", "no such function", "vtable")):
        return (
            f"the expression {where!r} may only read the table samples, with the functions "
            f"{', '.join(sorted(_FUNCTIONS))}: {error}"
        )
    return f"the expression {where!r} is invalid: {error}; {_name_columns(columns)}"
