"""The rules about names, read from the source: a name is the field's noun for the value, a function's name is a verb.

``check`` holds a file against them. The names that still break a rule are ``EXCEPTIONS``: the list may only become
shorter. ``python -P tests/names.py core/wire`` prints the violations of folders and files, exceptions too.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "transport", "actors", "launch")

# Words that a reader must look up where they were bound: nothing in them says of which kind the value is.
PRONOUNS = {
    "asked", "each", "found", "given", "here", "known", "left", "made", "one", "others", "own", "taken", "there",
    "wanted",
}  # fmt: skip
IRREGULAR_PARTICIPLES = {
    "begun", "brought", "built", "chosen", "done", "drawn", "found", "given", "gone", "got", "heard", "held", "kept",
    "known", "left", "lent", "lost", "made", "meant", "met", "said", "sent", "shown", "spent", "taken", "thought",
    "told", "written",
}  # fmt: skip
# Words that end as a participle does.
VERBS_AND_NOUNS = {"bed", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"}
ADVERBS = {"all", "not", "now"}  # before a participle

# How many functions and bindings of each name there still are. A rename lowers its number, or removes its row.
EXCEPTIONS: dict[str, int] = {
    "escaped": 1,
    "flattened": 1,
    "found": 13,
    "gathered": 1,
    "given": 12,
    "here": 2,
    "known": 6,
    "left": 1,
    "merged": 1,
    "named": 1,
    "one": 3,
    "others": 2,
    "own": 3,
    "resolved": 1,
    "rounded": 1,
    "shaped": 1,
    "stored": 1,
    "taken": 1,
    "there": 2,
    "wanted": 4,
    "written": 1,
}


def check(path: str, source: str) -> Iterator[tuple[str, str]]:
    """Each violation: the name without its underscores, and ``path:line: name (rule)``."""
    tree = ast.parse(source)
    methods = {id(node) for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for node in owner.body}
    for node in ast.walk(tree):
        for name, line in _bindings(node):
            if name.strip("_") in PRONOUNS:
                yield name.strip("_"), f"{path}:{line}: {name} (a name is a noun, no pronoun or participle)"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") not in PRONOUNS:
            # Public methods are the events of a state machine too: ``closed(group)``.
            is_event = id(node) in methods and not node.name.startswith("_")
            if not is_event and not _is_value(node) and _is_participle(node.name):
                yield node.name.strip("_"), f"{path}:{node.lineno}: {node.name} (a function's name is a verb)"


def _bindings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """The name that the node binds, if it binds one, and its line."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name, node.lineno
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name, node.lineno


def _is_value(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for a property, whose name may be an adjective."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    return bool(names & {"property", "cached_property", "setter"})


def _is_participle(name: str) -> bool:
    """True if the name has past participles and adverbs only: ``_opened``, ``_now_lent``; not ``merged_weights``."""
    words = [word for word in name.strip("_").split("_") if word not in ADVERBS]
    return bool(words) and all(
        word in IRREGULAR_PARTICIPLES or (word.endswith("ed") and word not in VERBS_AND_NOUNS)
        for word in words
    )


def sources(names: tuple[str, ...] = FOLDERS) -> Iterator[tuple[str, str]]:
    """The path, relative to the checkout, and the text of each Python file in these folders."""
    for name in names:
        paths = [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*.py"))
        for path in paths:
            yield str(path.relative_to(ROOT)), path.read_text()


def violations(names: tuple[str, ...] = FOLDERS) -> dict[str, list[str]]:
    """Each name that breaks a rule, with the places."""
    places: dict[str, list[str]] = {}
    for path, source in sources(names):
        for name, place in check(path, source):
            places.setdefault(name, []).append(place)
    return places


HANGING_COMMENT = re.compile(r"^\s*[])}]+\S*\s*#(?!!)(?!.*(?:fmt: (?:skip|on|off)|type: ignore|noqa))")


def hanging_comments(path: str, source: str) -> list[str]:
    """The comments that stand behind a closing bracket alone in its line: a formatter has cut the line to make room."""
    return [
        f"{path}:{number}: put the comment above its statement: {line.strip()}"
        for number, line in enumerate(source.splitlines(), 1)
        if HANGING_COMMENT.match(line)
    ]


if __name__ == "__main__":
    for lines in violations(tuple(sys.argv[1:]) or FOLDERS).values():
        print("\n".join(lines))  # noqa: T201
