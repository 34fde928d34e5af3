"""Pages of the public names, for the site of the documentation: signatures, docstrings and places in the source.

They are written when the site is built, and no file of the repository holds them: a docstring is changed in one place,
and a page can't disagree with the code. A name is public if ``__all__`` of one of ``DOORS`` has it, or if it is an
error of one of ``ERRORS``. Signatures are the text of the source, so a default reads as it was written.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
DOORS: Final = ("flexmarl", "flexmarl.core", "flexmarl.transport", "flexmarl.actors", "flexmarl.testing")
ERRORS: Final = ("flexmarl.transport.errors", "flexmarl.actors.errors", "flexmarl.launch.errors")
"""Those of the runtime are in ``flexmarl.core``."""
MODULES: Final = (*DOORS, *ERRORS)

_COLUMNS: Final = 100
_CODE_SPAN: Final = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_NAME: Final = re.compile(
    r"(`+)(?!`)(?P<code>.+?)(?<!`)\1(?!`)|\b(?P<words>(?:[A-Z][a-z]+){2,})\b", re.DOTALL
)
_INDENTED: Final = re.compile(r"(^    .*(?:\n+    .*)*)", re.MULTILINE)
_KEPT: Final = re.compile(
    r"(^ *```[^\n]*\n.*?^ *```$|^#[^\n]*$|\[[^\]\n]*\]\([^)\n]*\))", re.MULTILINE | re.DOTALL
)
_LIST_ITEM: Final = re.compile(r"[-*] |\d+\. ")
_HIDDEN_DECORATORS: Final = ("override", "abstractmethod", "overload")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Member:
    """A method or a property of a class, by its definitions: several if it is overloaded."""

    name: str
    definitions: tuple[Function, ...]
    text: str


def page_of(door: str) -> str:
    """The page of a door in the site."""
    return f"api/{door.removeprefix('flexmarl.').replace('.', '-')}.md"


def api_pages() -> dict[str, str]:
    """The text of each page, by its place in the site. Imports the package, with torch."""
    return {page_of(module): _page(module) for module in MODULES}


@cache
def anchors() -> dict[str, str]:
    """For each public name, as code has it, its page and its part: ``ActorSystem.spawn``, ``flexmarl.connect``."""
    places: dict[str, str] = {}
    for door in MODULES:
        places[door] = page_of(door)
        for name, entry in _entries(door):
            place = f"{page_of(_home(entry, name))}#{name}"
            places[f"{door}.{name}"] = place
            places[name] = place
            if inspect.isclass(entry):
                places |= {f"{name}.{member.name}": f"{place}.{member.name}" for member in members_of(entry)}
    return places


def _entries(door: str) -> Iterator[tuple[str, Any]]:
    module = importlib.import_module(door)
    names = module.__all__ if door in DOORS else _errors(module)
    for name in sorted(names, key=str.lower):
        yield name, getattr(module, name)


def _errors(module: ModuleType) -> list[str]:
    """The errors of a module that no door has."""
    return [
        name
        for name, entry in vars(module).items()
        if inspect.isclass(entry)
        and issubclass(entry, Exception)
        and entry.__module__ == module.__name__
        and not any(name in importlib.import_module(door).__all__ for door in DOORS)
    ]


def _home(entry: Any, name: str) -> str:
    """The module whose page describes a name: the last door that has it, which is the one of its package."""
    doors = [door for door in DOORS if getattr(importlib.import_module(door), name, None) is entry]
    return doors[-1] if doors else str(entry.__module__)


# --------------------------------------------------------------------------- pages


def _page(door: str) -> str:
    parts = [f"# {door}", markdown_of(_docstring(_module_tree(door)))]
    for name, entry in _entries(door):
        home = _home(entry, name)
        parts.append(f"## {name} {{#{name}}}")
        if home == door:
            parts += _class_parts(name, entry) if inspect.isclass(entry) else _function_parts(entry)
        else:
            parts.append(f"The same as `{home}.{name}`.")
    return with_api_links("\n\n".join(filter(None, parts)), page_of(door), every=True) + "\n"


def _class_parts(name: str, owner: type[Any]) -> Iterator[str]:
    tree = _class_tree(owner)
    fields = _fields_of(owner)
    initializer = next(
        (member for cls in owner.__mro__ for member in _functions(cls) if member.name == "__init__"), None
    )
    if fields and not _functions_named(tree, "__init__"):
        yield _code(_class_line(tree), *(f"    {ast.unparse(node)}" for node, _ in fields))
    elif initializer is not None:
        yield _code(*_signature(initializer, name=name, prefix=""))
    yield f"{_bases(owner)}Source: {_source(owner)}"
    yield markdown_of(_docstring(tree))
    yield markdown_of(_docstring(initializer))
    if texts := [f"- `{node.target.id}`: {_one_line(text)}" for node, text in fields if text]:  # type: ignore[union-attr]
        yield "\n".join(texts)
    for member in members_of(owner):
        yield f"### {name}.{member.name} {{#{name}.{member.name}}}"
        yield _code(*(line for node in member.definitions for line in _signature(node)))
        yield markdown_of(member.text)


def _function_parts(function: Any) -> Iterator[str]:
    plain = inspect.unwrap(function)
    nodes = _functions_named(_module_tree(plain.__module__), plain.__name__)
    definitions = [node for node in nodes if _is_overload(node)] or nodes
    yield _code(*(line for node in definitions for line in _signature(node)))
    yield f"Source: {_source(plain)}"
    yield markdown_of(_docstring(nodes[-1]))


def _bases(owner: type[Any]) -> str:
    names = [base.__name__ for base in owner.__bases__ if base.__name__ not in ("object", "Generic", "ABC")]
    return f"Base: {', '.join(f'`{name}`' for name in names)}. " if names else ""


def _source(entry: Any) -> str:
    lines = inspect.getsourcelines(entry)
    path = Path(inspect.getsourcefile(entry) or "").resolve().relative_to(ROOT)
    return f"`{path}:{lines[1]}`"


def _docstring(node: ast.Module | ast.ClassDef | Function | None) -> str:
    """The docstring without the indentation of its quotes, empty if there is no docstring. ``inspect.cleandoc`` takes
    the least indentation of its lines, so a docstring of a line and of code would lose the code's."""
    match node.body[0] if node is not None else None:
        case ast.Expr(value=ast.Constant(value=str(text)), col_offset=margin):
            first, *lines = text.splitlines()
            return "\n".join([first, *(line[margin:] for line in lines)]).strip("\n ")
    return ""


# --------------------------------------------------------------------------- classes by their source


def members_of(owner: type[Any]) -> list[Member]:
    """The public methods and properties of a class and of its bases in flexmarl that no door has, in their order.

    One without a docstring has that of the method it overrides. Without one there either, a method of a base outside
    flexmarl is repeated or refused, and is left out.
    """
    members: dict[str, Member] = {}
    for cls in _described_with(owner):
        names = dict.fromkeys(node.name for node in _functions(cls) if not node.name.startswith("_"))
        for name in (name for name in names if name not in members):
            nodes = _functions_named(_class_tree(cls), name)
            bases = [base for base in cls.__mro__[1:] if name in vars(base)]
            texts = [
                _docstring(node)
                for base in filter(_is_ours, bases)
                for node in _functions(base)
                if node.name == name
            ]
            text = next(filter(None, [_docstring(nodes[-1]), *texts]), "")
            if text or all(map(_is_ours, bases)):
                overloads = [node for node in nodes if _is_overload(node)]
                members[name] = Member(name, tuple(overloads or nodes[:1]), text)
    return list(members.values())


def _described_with(owner: type[Any]) -> list[type[Any]]:
    return [cls for cls in owner.__mro__ if cls is owner or (_is_ours(cls) and cls not in _public_classes())]


@cache
def _public_classes() -> frozenset[type[Any]]:
    return frozenset(entry for door in MODULES for _, entry in _entries(door) if inspect.isclass(entry))


def _is_ours(cls: type[Any]) -> bool:
    return cls.__module__.partition(".")[0] == "flexmarl"


def _class_tree(owner: type[Any]) -> ast.ClassDef:
    nodes = _module_tree(owner.__module__).body
    return next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == owner.__name__)


@cache
def _module_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _functions(owner: type[Any]) -> list[Function]:
    return [node for node in _class_tree(owner).body if isinstance(node, Function)] if _is_ours(owner) else []


def _functions_named(tree: ast.ClassDef | ast.Module, name: str) -> list[Function]:
    return [node for node in tree.body if isinstance(node, Function) and node.name == name]


def _is_overload(node: Function) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


def _fields_of(owner: type[Any]) -> list[tuple[ast.AnnAssign, str]]:
    """The public fields of a class with the text under each; those of its bases first."""
    fields: dict[str, tuple[ast.AnnAssign, str]] = {}
    for cls in reversed([cls for cls in owner.__mro__ if _is_ours(cls)]):
        body = _class_tree(cls).body
        for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                    match after:
                        case ast.Expr(value=ast.Constant(value=str(text))):
                            fields[name] = node, text
                        case _:
                            fields[name] = node, ""
    return list(fields.values())


def _class_line(tree: ast.ClassDef) -> str:
    decorators = "".join(f"@{ast.unparse(decorator)}\n" for decorator in tree.decorator_list)
    bases = ", ".join(ast.unparse(base) for base in tree.bases)
    return f"{decorators}class {tree.name}{f'({bases})' if bases else ''}:"


# --------------------------------------------------------------------------- signatures


def _signature(node: Function, *, name: str = "", prefix: str | None = None) -> Iterator[str]:
    """The lines of a function's first line, without ``self``; one for each parameter if they don't fit into one."""
    if prefix is None:
        for decorator in node.decorator_list:
            if ast.unparse(decorator) not in _HIDDEN_DECORATORS:
                yield f"@{ast.unparse(decorator)}"
        prefix = "async def " if isinstance(node, ast.AsyncFunctionDef) else "def "
    parameters = _parameters(node.args)
    if parameters[:1] in (["self"], ["cls"]):
        del parameters[0]
    result = (
        f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    )
    begin, end = f"{prefix}{name or node.name}(", f"){result}"
    line = f"{begin}{', '.join(parameters)}{end}"
    if len(line) <= _COLUMNS:
        yield line
    else:
        yield begin
        yield from (f"    {parameter}," for parameter in parameters)
        yield end


def _parameters(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parameters = [_parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        parameters.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        parameters.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        parameters.append("*")
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters += [_parameter(*pair) for pair in keywords]
    if arguments.kwarg is not None:
        parameters.append(f"**{ast.unparse(arguments.kwarg)}")
    return parameters


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(argument)
    return f"{ast.unparse(argument)}{' = ' if argument.annotation else '='}{ast.unparse(default)}"


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


# --------------------------------------------------------------------------- docstrings as markdown


def markdown_of(docstring: str) -> str:
    """A docstring as markdown: text outside of code has no meaning of markdown or HTML, lists begin after a blank line,
    and indented lines are blocks of Python."""
    parts = _INDENTED.split(docstring)  # the odd ones are code
    return "\n\n".join(
        _code(textwrap.dedent(part).rstrip("\n"))
        if number % 2
        else _separate_lists(_escape(part.strip("\n")))
        for number, part in enumerate(parts)
        if part.strip("\n")
    )


def _separate_lists(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        if _LIST_ITEM.match(line) and lines and not re.match(r" |[-*] |\d+\. |$", lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _escape(text: str) -> str:
    parts = []
    end = 0
    for span in _CODE_SPAN.finditer(text):
        parts += [re.sub(r"([*_<\[\]])", r"\\\1", text[end : span.start()]), span[0]]
        end = span.end()
    parts.append(re.sub(r"([*_<\[\]])", r"\\\1", text[end:]))
    return "".join(parts)


def _one_line(text: str) -> str:
    return " ".join(_escape(text).split())


# --------------------------------------------------------------------------- links to these pages


def with_api_links(text: str, page: str, *, every: bool = False) -> str:
    """``text`` of a page in the site, with a link to the reference from the first code that is a public name. With
    ``every``, for pages of the reference: from each one, and from names of several words outside of code, as in
    "Raises CallTimeout". Headings, blocks of code and links stay as they are."""
    seen: set[str] = set()

    def replace(match: re.Match[str]) -> str:
        name = match["code"] or match["words"]
        place = _place(name)
        if not place or (not every and (place in seen or match["words"])):
            return match[0]
        seen.add(place)
        return f"[{match[0]}]({_relative(place, page)})"

    parts = _KEPT.split(text)
    return "".join(part if number % 2 else _NAME.sub(replace, part) for number, part in enumerate(parts))


def _place(code: str) -> str:
    """The page and the part of a public name; empty for other code. A word such as ``run`` means too many things: a
    name without its door has a capital or an underscore."""
    name = code.removesuffix("()")
    if "." not in name and name.islower() and "_" not in name:
        return ""
    return anchors().get(name, "")


def _relative(place: str, page: str) -> str:
    return place.removeprefix("api/") if page.startswith("api/") else f"{'../' * page.count('/')}{place}"


def names_without_text() -> list[str]:
    """The public names and members that have no docstring to show."""
    names = []
    for door in MODULES:
        for name, entry in _entries(door):
            if not entry.__doc__ or entry.__doc__.startswith(f"{name}("):  # the latter is that of a dataclass
                names.append(f"{door}.{name}")
            if inspect.isclass(entry):
                names += [f"{door}.{name}.{member.name}" for member in members_of(entry) if not member.text]
    return names
