"""Lines of commands on standard output and standard error. It imports nothing large."""

import json
import sys
from typing import Any

import click

from ....core.base.texts import printable


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints ``text``, which may be a model's, a recipe's or another host's: control characters are shown."""
    click.echo(printable(text), err=err, nl=nl)


def echo_file(text: str) -> None:
    """Prints the content of a file, such as a log. A terminal gets its control characters shown; a file or a program,
    as in ``flexmarl logs RUN > file``, gets it as it is."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    click.echo(printable(text) if on_terminal else text, nl=False)


def echo_json(record: Any) -> None:
    """Prints one JSON object, whose control characters are JSON's own escapes."""
    click.echo(json_line(record))


def json_line(record: Any, **options: Any) -> str:
    """``record`` in one line of ASCII without control characters. ``options``: of ``json.dumps``, which leaves DEL."""
    return json.dumps(record, **options).replace("\x7f", "\\u007f")
