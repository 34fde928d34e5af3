"""launch/docs/troubleshooting.md quotes messages that the code has, settings that exist, and commands that exist."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from flexmarl.launch.cli.registry import cli
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.monitoring.slowness.findings import _CAUSES, findings

from .checkouts import PACKAGE, ROOT
from .setting_keys import settings

PAGE = ROOT / "launch" / "docs" / "troubleshooting.md"
_VALUE = "\0"  # stands for a value in an f-string
_CODE = re.compile(r"`([^`]+)`")
# Python's own words, and PyTorch's.
FOREIGN = {"AttributeError: 'coroutine' object has no attribute 'text'", "CUDA out of memory"}


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def messages() -> list[str]:
    """The texts quoted in a first column: those of more than one word."""
    return [quote for cell, *_ in rows() for quote in _CODE.findall(cell) if " " in quote]


@cache
def texts() -> tuple[str, ...]:
    """Every text in the package's code, with ``_VALUE`` for each value in it."""
    files = [file for folder in PACKAGE for file in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(dict.fromkeys(text for file in files for text in texts_of(file)))


def texts_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            yield _text(node)


def _text(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case _:
            return _VALUE


def is_in_code(message: str) -> bool:
    """True if one text of the code has all parts of ``message`` in their order."""
    return any(quotes(message, text) for text in texts())


def quotes(message: str, text: str) -> bool:
    """True if ``text`` has all parts of ``message`` in their order. ``...`` stands for a value or more."""
    parts = [part for part in message.split("...") if part.strip()]
    if not all(part in text for part in parts):  # of thousands of texts, few need the slower search
        return False
    return re.search(".*".join(re.escape(part) for part in parts), text, re.DOTALL) is not None


def test_a_quote_of_no_text_is_found_out() -> None:
    assert is_in_code("the engine has failed: ...") and is_in_code("no actor names a wait; ...")
    assert not is_in_code("the engine has stumbled: ...")
    assert not is_in_code("the engine has failed: ... prompt tokens")


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert message in FOREIGN or is_in_code(message)


@pytest.mark.parametrize("module", [*sorted({cause.__module__ for cause, _ in _CAUSES}), findings.__module__])
def test_every_cause_of_slowness_has_a_row(module: str) -> None:
    """Also one of a run that learns little."""
    file = sys.modules[module].__file__
    assert file is not None
    sentences = [text for text in texts_of(Path(file)) if _VALUE in text]
    quoted = [message for message in messages() if any(quotes(message, text) for text in sentences)]
    assert quoted, f"{PAGE.name} has no row for the finding of {module.rpartition('.')[2]}"


def test_the_page_quotes_messages_of_each_kind() -> None:
    assert len(messages()) > 60
    assert all(len(row) == 3 and all(row) for row in rows())


def test_its_settings_exist() -> None:
    keys = [key for key, _ in settings(RunConfig)]
    sections = {part for key in keys for part in key.split(".")[:-1]}
    quotes = {quote.partition("=")[0] for row in rows() for cell in row[1:] for quote in _CODE.findall(cell)}
    dotted = {
        quote
        for quote in quotes
        if re.fullmatch(r"[a-z_]+(\.[a-z_<>]+)+", quote) and quote.split(".")[0] in sections
    }
    assert len(dotted) > 30
    assert {quote for quote in dotted if not any(f".{key}".endswith(f".{quote}") for key in keys)} == set()


def test_its_commands_exist() -> None:
    names = set(re.findall(r"`flexmarl (\w+)", PAGE.read_text()))
    assert len(names) > 6 and names <= {
        *cli.list_commands(cli.make_context("flexmarl", [], resilient_parsing=True))
    }
