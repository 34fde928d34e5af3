"""Mistakes that the schema finds, as lines for the author of the config: the key, the value, and the choices there."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, get_args, get_origin

from pydantic import Tag

from ...actors.config_base import Config
from ...actors.names import PolicyName
from ...core.base.texts import guess
from .config_sections import AgentConfig, AgentWithPolicyConfig, PolicyConfig
from .run_config import RunConfig
from .written_config import Defaults, Location, WrittenConfig

_MOST_PLACES: Final = 3
_NOT_QUANTIZED: Final = (
    "policies are trained as float32 or bfloat16, not quantized; model.dtype=bfloat16 or a section lora takes less "
    "memory"
)
_FOREIGN: Final = dict.fromkeys(
    ("load_in_4bit", "load_in_8bit", "quantization", "quantization_config"), _NOT_QUANTIZED
)
"""Keys of other programs, which have no counterpart here."""


def problem_text(item: Any, written: WrittenConfig) -> str:
    """One line for a mistake that pydantic found, with the key as it is written; several for those of sections against
    each other."""
    location, chosen = _without_union_tags(item["loc"], written)
    key, value, kind = written.key(*location), item["input"], item["type"]
    if kind == "model_missing" and location[0] == "agents" and "model" not in value:
        policies = f"; there are: {', '.join(written.policies)}" if written.policies else ""
        return f"{key}: neither `model` nor `policy`: give it a model, or write `policy: NAME`{policies}"
    if kind == "model_missing":
        return f"{written.key(*location, 'model')}: is missing"
    if kind == "extra_forbidden" and chosen:
        allowed = ", ".join(_keys(item["loc"][:-1], written))
        near = guess(str(location[-1]), _keys(item["loc"][:-1], written))
        section = f"{_noun_of(location[:-1])} {chosen}"
        return f"{key}: the {section} has no such option (value {value!r}); allowed: {allowed}{near}"
    if kind == "extra_forbidden":
        remedy = _remedy_of_misplaced(location, written)
        if remedy is None:
            keys = list(_list_allowed(location, written))
            near = _guess_key(str(location[-1]), value, keys)
            return f"{key}: there is no such key (value {value!r}); allowed: {', '.join(keys)}{near}"
        return f"{key}: {remedy}"
    if kind in ("union_tag_invalid", "union_tag_not_found") and isinstance(value, dict):
        names = item["ctx"].get("expected_tags", "").replace("'", "")
        tag = item["ctx"].get("tag")
        chooses = next((word for word, choice in value.items() if choice == tag), "name")
        return f"{key}.{chooses}={value.get(chooses)!r}: there is no such {_noun_of(location)}; there are: {names}"
    if kind == "missing":
        return f"{key}: is missing{_misspelt(str(location[-1]), value)}"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        example = (
            ": write `name: {}` for each, without a dash" if location[-1] in ("agents", "policies") else ""
        )
        return f"{key}={value!r}: is {_noun(value)}, needs a section of keys{example}"
    if kind == "tuple_type":
        return f"{key}={value!r}: is {_noun(value)}, needs a list"
    message = written.in_text(item["msg"].removeprefix("Value error, ").partition(" or instance of ")[0])
    if isinstance(value, dict):  # the message names the value; a section is too long to be shown
        return f"{key}: {message}" if key else message
    return f"{key}={value!r}: {message}"


def _noun_of(location: Sequence[str | int]) -> str:
    """The noun of a section: its key, or that of its list in the singular."""
    *_, above, last = ("", *location)
    return str(last) if isinstance(last, str) else str(above).removesuffix("s")


def _guess_key(word: str, value: Any, allowed: Sequence[str]) -> str:
    """The key that was meant, if it can be guessed: one beside it, or one of the same name in another section."""
    if near := guess(word, allowed):
        return near
    if word in _FOREIGN:
        return f"; {_FOREIGN[word]}"
    inner = next(iter(value), "") if isinstance(value, dict) else ""
    places = sorted((path for path in _PATHS if path[-1] == word), key=len)
    below = [(*path, inner) for path in places if (*path, inner) in _PATHS]
    places = below or [path for path in places if path not in {longer[:-1] for longer in _PATHS}]
    if not 0 < len(places) <= _MOST_PLACES:
        return ""
    return f"; do you mean {' or '.join('.'.join(path) for path in places)}?"


def _misspelt(word: str, section: Any) -> str:
    """The key in ``section`` that was meant to be the missing ``word``."""
    near = difflib.get_close_matches(word, map(str, section), 1, 0.8) if isinstance(section, dict) else []
    return f"; there is {near[0]}: write {word}" if near else ""


def _noun(value: Any) -> str:
    return {list: "a list", str: "a text", int: "a number", float: "a number"}.get(type(value), "a value")


def _paths(model: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All keys of a section and of the sections in it, those with one form."""
    for name, field in getattr(model, "model_fields", {}).items():
        yield (*above, name)
        yield from _paths(_section_class(field.annotation), (*above, name))


def _remedy_of_misplaced(location: Location, written: WrittenConfig) -> str | None:
    """The right place of a setting of policies that is written in an agent, or of agents in a policy."""
    kind, name, *rest = *location, "", ""
    if kind == "agents" and _is_key(PolicyConfig, location[2:]):
        policy = PolicyName(written.policy_of(str(name)))
        section = f"policies.{policy}" if policy in written.policies else f"agents.{policy}"
        remedy = f"write {section}.{'.'.join(map(str, location[2:]))}"
        remedy += f", or leave agents.{name}.policy out" if rest[0] == "model" else ""
        return f"a setting of policy {policy!r}, for all agents that use it: {remedy}"
    if kind == "policies" and _is_key(AgentConfig, location[2:]):
        users = [agent for agent in written.agents if written.policy_of(agent) == name]
        place = f"agents.{(users or ['NAME'])[0]}.{'.'.join(map(str, location[2:]))}"
        return f"a setting of agents, each has its own: write {place}"
    return None


def _list_allowed(location: Location, written: WrittenConfig) -> Iterable[str]:
    """The keys beside the unknown one at ``location``, as they are written."""
    keys = [*_keys(location[:-1], written), *(Defaults.model_fields if len(location) == 1 else ())]
    return (written.key(*location[:-1], key).rpartition(".")[2] for key in keys)


def _is_key(model: type[Config], path: Location) -> bool:
    """True if ``model`` has the key of that path."""
    section: Any = model
    for part in path:
        field = getattr(section, "model_fields", {}).get(part)
        if field is None:
            return False
        section = _section_class(field.annotation)
    return True


def _keys(location: Location, written: WrittenConfig) -> Iterable[str]:
    """Keys of the section at ``location``; none if the schema has no such section."""
    fields: Iterable[str] = getattr(_section(location, written), "model_fields", ())
    return fields


def _without_union_tags(location: Location, written: WrittenConfig) -> tuple[Location, str]:
    """A location of pydantic's without the names of classes that were chosen by ``name``, and the last of these."""
    plain: Location = ()
    chosen = ""
    for number, part in enumerate(location):
        if isinstance(_section(location[:number], written), dict):
            chosen = str(part)
        else:
            plain = (*plain, part)
    return plain, chosen


def _section(location: Location, written: WrittenConfig) -> Any:
    """The class of the section at a location of pydantic's; a dict of classes by name if one is chosen there; None if
    the schema has no such section."""
    model: Any = RunConfig
    for depth, part in enumerate(location):
        if depth == 1 and location[0] == "agents":
            model = AgentWithPolicyConfig if written.has_own_policy(part) else AgentConfig
        elif get_origin(model) is dict:  # policies and columns are by name
            model = get_args(model)[1]
        elif isinstance(model, dict):
            model = model.get(str(part))
        elif get_origin(model) is tuple:  # a list of sections
            model = _section_class(next(iter(get_args(get_args(model)[0])), None))
        else:
            field = getattr(model, "model_fields", {}).get(part)
            model = None if field is None else _section_class(field.annotation)
    return model


def _section_class(annotation: Any) -> Any:
    kinds = get_args(annotation)
    if get_origin(annotation) in (dict, tuple):
        return annotation
    tagged = [kind for kind in kinds if isinstance(getattr(kind, "__metadata__", [None])[0], Tag)]
    if tagged:
        return {kind.__metadata__[0].tag: kind.__origin__ for kind in tagged}
    return next((kind for kind in kinds if hasattr(kind, "model_fields")), annotation)


_PATHS: Final = (
    *(("agent_defaults", *path) for path in _paths(AgentWithPolicyConfig)),
    *(path for path in _paths(RunConfig) if path[0] not in ("agents", "policies")),
)
"""All keys, as one may write them for all agents."""
