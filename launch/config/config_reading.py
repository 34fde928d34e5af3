"""From a recipe's YAML and dotted overrides to the run's configuration.

    resolve("sort-digits", ["training.steps=10", "agents.sorter.instances=2"])  ->  RunConfig

A run directory keeps the resolved config as ``config.yaml``, which resolves to itself.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ...actors.errors import ConfigError
from .config_policies import Expanded, expanded, merged, with_defaults
from .init_from import check_weights, with_init_from
from .run_config import RunConfig
from .schema_errors import problem_text
from .written_keys import WrittenKeys

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
    """Returns the dotted key of an override ``KEY=VALUE``."""
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
            problems = [line for item in items for line in problem_text(item, whole.own, keys).splitlines()]
    listed = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
    raise ConfigError(f"{source}, overrides included:\n{listed}")


def recipe_folder(recipe: str) -> Path:
    """Finds a recipe: the folder of a built-in one, or a folder by its path. Raises ConfigError if there is
    no recipe."""
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
    """Returns the whole config as YAML, defaults included: ``check`` reads the same config from it."""
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


def flattened(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping by dotted key; an empty section is a value."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
