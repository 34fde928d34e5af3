"""From a recipe's YAML and dotted overrides to the run's configuration.

    resolve("sort-digits", ["training.steps=10", "agents.sorter.instances=2"])  ->  RunConfig

A run directory keeps the resolved config as ``config.yaml``, which resolves to itself.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import Tag, ValidationError

from ...actors.errors import ConfigError
from .config_policies import Expanded, expanded, merged, with_defaults
from .init_from import check_weights, with_init_from
from .run_config import RunConfig
from .written_keys import Location, WrittenKeys

RECIPES = Path(__file__).parents[1] / "recipes"
_RECIPE_NAME = re.compile(r"[a-z0-9_-]+")
_OF_ALL_POLICIES = {"engine", "trainer"}
"""Sections of policies that may be written at the top level, for all of them."""
_NAMED_SECTIONS = {"agents": "agent", "policies": "policy"}


def resolve(recipe: str, overrides: Sequence[str]) -> RunConfig:
    """The config of a built-in recipe (by name) or of a recipe folder, with dotted overrides applied.

    Raises ConfigError for an unknown recipe, a file that is not a YAML mapping, and anything that the schema refuses.
    """
    return resolve_written(recipe, overrides)[0]


def resolve_written(recipe: str, overrides: Sequence[str]) -> tuple[RunConfig, WrittenKeys]:
    """The same, and the places at which its values are written."""
    folder = recipe_folder(recipe)
    source = folder / "config.yaml"
    return _resolved(read_yaml(source), folder, overrides, str(source))


def resolve_mapping(
    config: Mapping[str, Any], overrides: Sequence[str], source: str
) -> tuple[RunConfig, WrittenKeys]:
    """The same for a mapping with the keys of a ``config.yaml``, and the name or the folder of the recipe as
    ``recipe``. A resolved config resolves to itself."""
    raw = copy.deepcopy(dict(config))
    recipe = raw.pop("recipe", None)
    if not isinstance(recipe, str | Path):
        raise ConfigError(f"{source} has no key recipe: write the name or the folder of one")
    return _resolved(raw, recipe_folder(str(recipe)), overrides, source)


def resolve_file(path: Path, overrides: Sequence[str]) -> tuple[RunConfig, WrittenKeys]:
    """The same for a YAML file. Without the key ``recipe``, its folder is the recipe's."""
    return resolve_mapping({"recipe": path.parent, **read_yaml(path)}, overrides, str(path))


def _resolved(
    raw: dict[str, Any], folder: Path, overrides: Sequence[str], source: str
) -> tuple[RunConfig, WrittenKeys]:
    for override in overrides:
        _apply_override(raw, override)
    if "recipe" in raw:
        raise ConfigError(
            "the key recipe can't be set: the recipe is the word without '=' on the command line"
        )
    raw["recipe"] = str(folder)
    defaults = raw.pop("agent_defaults", None) or {}
    if not isinstance(defaults, dict):
        raise ConfigError(f"agent_defaults={defaults!r}: must be a section with the keys of an agent")
    if (init_from := raw.pop("init_from", None)) is not None:
        defaults = {"init_from": init_from, **defaults}
    top = {key: raw.pop(key) for key in _OF_ALL_POLICIES & raw.keys()}
    defaults = merged(defaults, top)
    _make_paths_absolute(raw, defaults, folder)
    complete = with_defaults(raw, defaults)
    for kind in _NAMED_SECTIONS:
        if isinstance(sections := complete.get(kind), dict):
            with_init_from(sections, kind, folder)
    whole = expanded(complete)
    keys = WrittenKeys(raw, defaults, whole.own, top)
    config = _checked(whole, keys, source)
    check_weights(config.policies, config.seed)
    return config, keys


def with_overrides(config: RunConfig, overrides: Sequence[str], source: str) -> RunConfig:
    """A resolved config with dotted overrides applied. Raises as ``resolve`` does; ``source``: its file."""
    raw = config.model_dump(mode="json")
    for override in overrides:
        _apply_override(raw, override)
    return check(raw, source)


def override_key(override: str) -> str:
    return override.partition("=")[0]


def check(raw: dict[str, Any], source: str) -> RunConfig:
    """The typed config. Raises ConfigError listing every problem, each with its key and value."""
    whole = expanded(raw)
    return _checked(whole, WrittenKeys(raw, own_policies=whole.own), source)


def _checked(whole: Expanded, keys: WrittenKeys, source: str) -> RunConfig:
    problems = whole.problems
    if not problems:
        try:
            return RunConfig.model_validate(whole.raw)
        except ValidationError as error:
            items = error.errors(include_url=False)
            problems = [line for item in items for line in _problem(item, whole.own, keys).splitlines()]
    listed = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
    raise ConfigError(f"{source}, overrides included:\n{listed}")


def recipe_folder(recipe: str) -> Path:
    built_in = RECIPES / recipe.replace("-", "_")
    folder = built_in if _RECIPE_NAME.fullmatch(recipe) and built_in.is_dir() else Path(recipe)
    for file in ("config.yaml", "workflow.py"):
        if not (folder / file).is_file():
            known = ", ".join(sorted(p.parent.name.replace("_", "-") for p in RECIPES.glob("*/config.yaml")))
            raise ConfigError(f"no recipe {recipe!r}: neither built in ({known}) nor a folder with a {file}")
    return folder.resolve()


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError if it can't be read or holds something else."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is invalid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no mapping of keys to values")
    return raw


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """``a.b.c=value`` with the value read as YAML, so that ``true``, ``[1, 2]`` and ``null`` have their types."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r}: write key.key=value, for example training.micro_batch=8")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is invalid YAML: {error}") from None
    *parents, last = key.split(".")
    _refuse_unknown_name(raw, [*parents, last], override)
    section = raw
    for depth, parent in enumerate(parents, 1):
        if section.get(parent) is None:
            section[parent] = {}
        if not isinstance(section[parent], dict):
            where = ".".join(parents[:depth])
            raise ConfigError(
                f"override {override!r}: {where} is the value {section[parent]!r}, not a section"
            )
        section = section[parent]
    section[last] = value


def _refuse_unknown_name(raw: dict[str, Any], keys: Sequence[str], override: str) -> None:
    """Agents and policies have defaults, so a misspelt name would be a further agent or policy."""
    kind = _NAMED_SECTIONS.get(keys[0])
    known = raw.get(keys[0])
    if kind and len(keys) > 1 and isinstance(known, dict) and keys[1] not in known:
        raise ConfigError(
            f"override {override!r}: there is no {kind} {keys[1]!r}; there are: {', '.join(map(str, known))}"
        )


def _make_paths_absolute(raw: dict[str, Any], defaults: dict[str, Any], folder: Path) -> None:
    """Changes both: model and tokenizer paths are relative to the recipe's folder, or else to the working directory.

    Names that are in neither, and are not written as paths, are a hub's. Raises ConfigError if a path leads nowhere.
    """
    for key, model in _models(raw, defaults):
        for part in ("path", "tokenizer"):
            if not isinstance(written := model.get(part), str):
                continue
            places = [folder / written, Path(written).expanduser()]
            if found := next((place for place in places if place.exists()), None):
                model[part] = str(found.resolve())
            elif written.startswith(("/", "./", "../", "~")):
                raise ConfigError(f"{key}.{part}={written!r}: there is no such file or folder")


def _models(raw: dict[str, Any], defaults: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every model section with its key. Values that are not sections are left for the schema to refuse."""
    if isinstance(model := defaults.get("model"), dict):
        yield "agent_defaults.model", model
    for kind in _NAMED_SECTIONS:
        sections = raw.get(kind)
        for name, section in sections.items() if isinstance(sections, dict) else ():
            model = section.get("model") if isinstance(section, dict) else None
            if isinstance(model, dict):
                yield f"{kind}.{name}.model", model


def _problem(item: Any, own: frozenset[str], keys: WrittenKeys) -> str:
    """One line for a mistake that pydantic found, with the key as it is written; several for those of sections against
    each other. ``own``: see ``Expanded``."""
    location, chosen = _plain(item["loc"])
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


def _plain(location: Location) -> tuple[Location, str]:
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


def flattened(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping by dotted key; an empty section is a value."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
