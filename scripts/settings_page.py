"""Writes the tables of launch/docs/settings.md from the schema of a run's configuration, launch/config/run_config.py.

    python scripts/settings_page.py           writes the page
    python scripts/settings_page.py --check   exits with 1 if the page is another one than it would write

A table stands between a first line and ``<!-- end -->``. All other text of the page is written by hand.

    <!-- settings: rollout.workers weights -->                whole keys; a section stands for all of its keys
    <!-- section: policies.<policy>.optimizer -->             the keys of one section, as they are within it
    <!-- section: policies.<policy>.engine name=vllm -->      those that only this choice of ``name`` has
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Tag
from pydantic.fields import FieldInfo

from flexmarl.actors.config_base import Config, Unit
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.config.written_config import Defaults

PAGE: Final = Path(__file__).parents[1] / "launch" / "docs" / "settings.md"

_TABLE: Final = re.compile(r"(<!-- (settings|section): (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_CHOICE: Final = re.compile(r"(\S+)(?: (?:name|branch|patch)=(\w+))?")
_NAMES: Final = {
    "agents": "agent", "columns": "column", "peers": "peer", "policies": "policy", "samplings": "sampling",
}  # fmt: skip
"""The placeholders of names that a user chooses, by the section that has them."""
_LISTS: Final = ("sinks", "rollout.filters")
"""Lists of sections."""
_CHOOSERS: Final = ("name", "branch", "patch")
"""The keys that choose the class of their section."""
_POWERS: Final = {2**40: "TiB", 2**30: "GiB", 2**20: "MiB"}
_DEFAULT_CHOICE: Final = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the schema. ``choice``: the ``name`` of the section's class that has it; empty for the default one.
    ``names``: of these classes, for the key that chooses one."""

    section: str
    name: str
    choice: str
    owner: type[Config]
    field: FieldInfo
    names: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}".removeprefix(".")


# --------------------------------------------------------------------------- the schema


def all_settings(*models: type[Config]) -> Iterator[Setting]:
    """Every key of a run's configuration, and of the defaults beside it, once; or of other ``models``."""
    for model in models or (RunConfig, Defaults):
        yield from _settings(model)


def _settings(model: type[Config], section: str = "", choice: str = _DEFAULT_CHOICE) -> Iterator[Setting]:
    """Every key of a section and of the sections in it, once."""
    for name, field in model.model_fields.items():
        key = f"{section}.{name}".removeprefix(".")
        classes = _classes(field.annotation)
        if not classes or key in _LISTS:
            yield Setting(section, name, choice, model, field)
        if key in _LISTS:
            for tag, chosen in classes.items():
                yield from _settings(chosen, f"{key}.{tag}")
        elif get_origin(field.annotation) is dict:
            for chosen in classes.values():
                yield from _settings(chosen, f"{key}.<{_NAMES[name]}>")
        else:
            yield from _of_choices(classes, key)


def _of_choices(classes: dict[str, type[Config]], section: str) -> Iterator[Setting]:
    keys: set[str] = set()
    for number, (tag, chosen) in enumerate(classes.items()):
        for setting in _settings(chosen, section, tag if number else _DEFAULT_CHOICE):
            if setting.name in _CHOOSERS and setting.section == section and len(classes) > 1:
                setting = replace(setting, names=tuple(classes))
            if setting.key not in keys:
                yield setting
        keys |= {setting.key for setting in _settings(chosen, section)}


def _classes(annotation: Any) -> dict[str, type[Config]]:
    """The classes of a section by their tags, in order; one without a tag has the empty one. Empty for a value."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return {"": annotation}
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        tags = [mark.tag for mark in metadata if isinstance(mark, Tag)]
        classes = _classes(inner)
        return {tags[0]: inner} if tags and classes else classes
    if get_origin(annotation) in (dict, tuple, Union, UnionType):
        return {tag: chosen for part in get_args(annotation) for tag, chosen in _classes(part).items()}
    return {}


@cache
def _texts(owner: type[Config]) -> dict[str, str]:
    """The texts under the fields of a class, as one line each. Pydantic could keep them as the fields' descriptions,
    at the price of parsing every class again in each process that imports it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def text_of(setting: Setting) -> str:
    """Returns the text under a setting's field. Raises KeyError if the field has no text."""
    for owner in setting.owner.__mro__:
        if setting.name in getattr(owner, "__annotations__", {}) and issubclass(owner, Config):
            return _texts(owner)[setting.name]
    raise KeyError(setting.key)


# --------------------------------------------------------------------------- cells


def default_of(setting: Setting) -> str:
    """The default as YAML, as code; large sizes in a larger unit too."""
    if setting.field.is_required():
        return "required"
    value = setting.field.get_default(call_default_factory=True, validated_data={})
    for size, unit in _POWERS.items():
        if unit_of(setting) == "bytes" and value % size == 0:
            return f"`{value}` ({value // size} {unit})"
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, float) and "e" in repr(value):
        mantissa, _, exponent = repr(value).partition("e")
        return f"{float(mantissa)}e{int(exponent)}"  # YAML reads 1e-6 as text
    return value if isinstance(value, str) else json.dumps(value)


def unit_of(setting: Setting) -> str:
    marks = _marks(setting.field.annotation, setting.field.metadata)
    return next((mark.name for mark in marks if isinstance(mark, Unit)), "")


def _marks(annotation: Any, metadata: Sequence[Any]) -> list[Any]:
    """The metadata of a type and of those that it is made of: an optional number has its bounds there."""
    marks = [
        inner for mark in metadata for inner in (mark.metadata if isinstance(mark, FieldInfo) else [mark])
    ]
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return [*marks, *_marks(inner, more)]
    if get_origin(annotation) in (Union, UnionType):
        return [*marks, *(mark for part in get_args(annotation) for mark in _marks(part, []))]
    return marks


def values_of(setting: Setting) -> str:
    if setting.names:
        return ", ".join(f"`{name}`" for name in setting.names)
    return ", ".join(dict.fromkeys(_values(setting.field.annotation, setting.field.metadata)))


def _values(annotation: Any, metadata: Sequence[Any]) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        yield from _values(inner, [*metadata, *more])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _values(part, metadata)
    elif origin is Literal:
        yield from (f"`{value}`" for value in get_args(annotation))
    elif annotation in (int, float):
        kind = "integer" if annotation is int else "number"
        yield f"{kind} {_range(_marks(annotation, metadata))}".strip()
    else:
        simple = {
            bool: "`true`, `false`",
            str: "text",
            Path: "path",
            NoneType: "`null`",
            dict: "mapping",
            tuple: "list",
        }
        yield simple.get(origin or annotation, "text")


def _range(marks: list[Any]) -> str:
    low: list[tuple[str, Any]] = [("≥", mark.ge) for mark in marks if isinstance(mark, Ge)]
    low += [(">", mark.gt) for mark in marks if isinstance(mark, Gt)]
    high: list[tuple[str, Any]] = [("≤", mark.le) for mark in marks if isinstance(mark, Le)]
    high += [("<", mark.lt) for mark in marks if isinstance(mark, Lt)]
    return ", ".join(f"{sign} {_bound(bound)}" for sign, bound in (*low[-1:], *high[-1:]))


def _bound(bound: Any) -> str:
    is_power = isinstance(bound, int) and bound > 2**20 and bound.bit_count() == 1
    return f"2^{bound.bit_length() - 1}" if is_power else f"{bound}"


# --------------------------------------------------------------------------- the page


def rendered(page: str) -> str:
    """The page with its tables. Raises KeyError for a section, a key or a choice that does not exist."""
    return _TABLE.sub(lambda block: f"{block[1]}{_table(block[2], block[3])}{block[4]}", page)


def keys_of(page: str) -> list[str]:
    """The keys of the page's tables, in its order."""
    return [setting.key for block in _TABLE.finditer(page) for setting in _chosen(block[2], block[3])]


def _table(kind: str, place: str) -> str:
    rows = [["key", "default", "unit", "values", "meaning"], ["---"] * 5]
    for setting in _chosen(kind, place):
        key = setting.name if kind == "section" else setting.key
        rows.append([f"`{key}`", default_of(setting), unit_of(setting), values_of(setting), text_of(setting)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _chosen(kind: str, place: str) -> list[Setting]:
    """The rows of a table."""
    if kind == "settings":
        return [setting for key in place.split() for setting in _under(key)]
    match = _CHOICE.fullmatch(place)
    if match is None:
        raise KeyError(place)
    rows = [
        setting
        for setting in all_settings()
        if setting.section == match[1] and setting.choice == (match[2] or _DEFAULT_CHOICE)
    ]
    if not rows:
        raise KeyError(place)
    return sorted(
        rows, key=lambda setting: setting.name not in _CHOOSERS
    )  # what the other keys depend on comes first


def _under(key: str) -> list[Setting]:
    rows = [setting for setting in all_settings() if setting.key == key or setting.section == key]
    if not rows:
        raise KeyError(key)
    return rows


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    current = rendered(page)
    if arguments == ["--check"]:
        if page != current:
            print(
                f"{PAGE} is not what the schema gives: run python scripts/settings_page.py", file=sys.stderr
            )
        return int(page != current)
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
