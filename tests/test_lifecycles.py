"""The texts that follow one thing through the whole house: each function, class and value that they name exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("core", "transport", "actors", "launch")
LIFECYCLES = (
    "core/delivery/connection.py",
    "core/supervision/supervisor.py",
    "transport/state.py",
    "actors/orchestrator/orchestrator.py",
)
"""A call out and back; from kill -9 to ready; a Set and a Get; from a query to the optimizer step."""

NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
ROW = re.compile(rf"^    ({NAME}(?:, {NAME})*) {{2,}}\S", re.MULTILINE)
CODE = re.compile(rf"``({NAME})(?:\(\))?``")
FILE_ENDINGS = (".py", ".md", ".yaml", ".jsonl")


@cache
def bindings() -> tuple[dict[str, set[str]], set[str]]:
    """The names in each class or file of the package, by its name, with those of the base classes; and all names."""
    scopes: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        tree = ast.parse(path.read_text())
        scopes.setdefault(path.stem, set()).update(_names(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                scopes.setdefault(node.name, set()).update(_names(node.body))
                bases.setdefault(node.name, set()).update(
                    re.split(r"[\[.]", ast.unparse(base))[-1 if "." in ast.unparse(base) else 0]
                    for base in node.bases
                )
    for name in bases:
        pending = set(bases[name])
        while pending:
            base = pending.pop()
            scopes[name] |= scopes.get(base, set())
            pending |= bases.get(base, set())
    return scopes, set(scopes).union(*scopes.values())


def _names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in (node for statement in body for node in ast.walk(statement)):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
            ):
                names.add(name)
    return names


def unknown_names(text: str) -> list[str]:
    """The names in the first column of its tables, and in its code, that the package lacks."""
    scopes, names = bindings()
    mentioned = [name for row in ROW.findall(text) for name in row.split(", ")] + CODE.findall(text)
    unknown = []
    for name in mentioned:
        if name.endswith(FILE_ENDINGS):
            continue
        scope, _, last = name.rpartition(".")
        if last not in (scopes.get(scope.rpartition(".")[2], set()) if scope else names):
            unknown.append(name)
    return unknown


@pytest.mark.parametrize("path", LIFECYCLES)
def test_each_name_of_a_lifecycle_exists(path: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / path).read_text()), clean=False) or ""
    rows = [name for row in ROW.findall(text) for name in row.split(", ") if "." in name]
    assert len(rows) > 5, "the table has another form than this test reads"
    assert unknown_names(text) == []


def test_a_name_that_is_gone_is_found() -> None:
    text = "    Pipeline.gone    x\n    Pipeline.start   calls ``Nowhere.f``, ``StoreApi.put``, ``gone_from_here``"
    assert unknown_names(text) == ["Pipeline.gone", "Nowhere.f", "gone_from_here"]
