"""Keys of the settings, from the models of the config."""

from collections.abc import Iterator
from types import NoneType
from typing import Annotated, get_args, get_origin

from pydantic.fields import FieldInfo

from flexmarl.actors.config_base import Config
from flexmarl.actors.filters.filter_config import FilterConfig
from flexmarl.launch.monitoring.sinks.sink_config import SinkConfig


def settings(model: type[Config], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a section and of the sections in it, with dots; names that a user chooses as ``<agent>``."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        kind = field.annotation
        kinds = [kind, *get_args(kind)]
        if NoneType in kinds:  # a choice of sections that may be left out
            kinds += [
                choice
                for option in kinds
                if get_origin(option) is Annotated
                for choice in get_args(option.__origin__)
            ]
        if get_origin(kind) is dict:
            kinds = [option.__origin__ if get_origin(option) is Annotated else option for option in kinds]
        if field.annotation in (tuple[SinkConfig, ...], tuple[FilterConfig, ...]):
            # a list of sections that are chosen by name
            yield key, field
            entry = get_args(field.annotation)[0]
            for section in (get_args(option)[0] for option in get_args(get_args(entry)[0])):
                yield from settings(section, f"{key}.{section.model_fields['name'].default}.")
            continue
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)]
        if choices := [
            option.__origin__
            for option in kinds
            if get_origin(option) is Annotated
            and isinstance(option.__origin__, type)
            and issubclass(option.__origin__, Config)
        ]:
            # chosen by name; the first is the default, and the others have some of its keys
            keys: set[str] = set()
            for section in choices:
                added = [row for row in settings(section, f"{key}.") if row[0] not in keys]
                yield from added
                keys |= {name for name, _ in added}
        elif not sections:
            yield key, field
        elif get_origin(kind) is dict:
            yield from settings(sections[0], f"{key}.<{_singular(name)}>.")
        else:
            yield from settings(sections[0], f"{key}.")


def _singular(name: str) -> str:
    return {"policies": "policy"}.get(name, name.removesuffix("s"))
