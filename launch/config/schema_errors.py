"""Mistakes that the schema finds, as lines for the author of the config: the key, the value, and the choices there."""

from collections.abc import Iterable
from typing import Any, get_args, get_origin

from pydantic import Tag

from .run_config import RunConfig
from .written_keys import Location, WrittenKeys


def problem_text(item: Any, own: frozenset[str], keys: WrittenKeys) -> str:
    """One line for a mistake that pydantic found, with the key as it is written; several for those of sections against
    each other. ``own``: see ``Expanded``."""
    location, chosen = _without_union_tags(item["loc"])
    if len(location) > 1 and location[0] == "policies" and location[1] in own:
        location = ("agents", *location[1:])
    if item["type"] == "model_missing":
        return f"{keys.key(*location, 'model')}: is missing"
    key = keys.key(*location)
    if item["type"] == "extra_forbidden" and chosen:
        allowed = ", ".join(_keys(item["loc"][:-1]))
        return f"{key}: the {location[-2]} {chosen} has no such option (value {item['input']!r}); allowed: {allowed}"
    if item["type"] == "extra_forbidden":
        return f"{key}: there is no such key (value {item['input']!r}); {_allowed_keys(location, own)}"
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        known = ", ".join(_choices(item["loc"]))
        return f"{key}.name={item['input']['name']!r}: there is no such {location[-1]}; there are: {known}"
    if item["type"] == "missing":
        return f"{key}: is missing"
    message = keys.in_text(item["msg"].removeprefix("Value error, ").partition(" or instance of ")[0])
    if isinstance(item["input"], dict):  # the message names the value; a section is too long to be shown
        return f"{key}: {message}" if key else message
    return f"{key}={item['input']!r}: {message}"


def _allowed_keys(location: Location, own: frozenset[str]) -> str:
    parents = [location[:-1]]
    if len(location) > 2 and location[0] == "agents" and location[1] in own:  # with its policy's settings
        parents.append(("policies", *location[1:-1]))
    keys = dict.fromkeys(key for parent in parents for key in _keys(parent))
    return f"allowed: {', '.join(keys)}"


def _keys(location: Location) -> Iterable[str]:
    """Keys of the section at ``location``; none if the schema has no such section."""
    fields: Iterable[str] = getattr(_section(location), "model_fields", ())
    return fields


def _without_union_tags(location: Location) -> tuple[Location, str]:
    """A location of pydantic's without the names of classes that were chosen by ``name``, and the last of these."""
    plain: Location = ()
    chosen = ""
    for number, part in enumerate(location):
        if isinstance(_section(location[:number]), dict):
            chosen = str(part)
        else:
            plain = (*plain, part)
    return plain, chosen


def _choices(location: Location) -> Iterable[str]:
    """The names of the classes for the section at ``location``; none if it has one class."""
    section = _section(location)
    return section if isinstance(section, dict) else ()


def _section(location: Location) -> Any:
    """The class of the section at a location of pydantic's; a dict of classes by name if one is chosen there; None if
    the schema has no such section."""
    model: Any = RunConfig
    for part in location:
        if get_origin(model) is dict:  # agents, policies and columns are by name
            model = get_args(model)[1]
        elif isinstance(model, dict):
            model = model.get(str(part))
        else:
            field = getattr(model, "model_fields", {}).get(part)
            model = None if field is None else _section_class(field.annotation)
    return model


def _section_class(annotation: Any) -> Any:
    kinds = get_args(annotation)
    if get_origin(annotation) is dict:
        return annotation
    tagged = [kind for kind in kinds if isinstance(getattr(kind, "__metadata__", [None])[0], Tag)]
    if tagged:
        return {kind.__metadata__[0].tag: kind.__origin__ for kind in tagged}
    return next((kind for kind in kinds if hasattr(kind, "model_fields")), annotation)
