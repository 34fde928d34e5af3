"""The tables of a benchmark, as its command prints them."""

from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any

from rich.console import Console


def drawn(tables: Callable[[Console, Mapping[str, Any]], None], result: Mapping[str, Any]) -> str:
    """The text that ``tables`` prints for a result."""
    text = StringIO()
    tables(Console(file=text, width=120), result)
    return text.getvalue()
