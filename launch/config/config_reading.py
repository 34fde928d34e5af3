"""From a recipe's YAML and dotted overrides to the run's configuration.

    resolve("sort-digits", ["training.steps=10", "agents.sorter.instances=2"])  ->  RunConfig

A run directory keeps the resolved config as ``config.yaml``, which resolves to itself.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from ...actors.errors import ConfigError
from ...core.base.texts import guess
from .model_files import check_weights, with_files
from .run_config import RunConfig
from .schema_errors import problem_text
from .written_config import UNCHANGED, Defaults, WrittenConfig

RECIPES = Path(__file__).parents[1] / "recipes"
_RECIPE_NAME = re.compile(r"[a-z0-9_-]+")
_NAMED_SECTIONS = {"agents": "agent", "policies": "policy"}


def resolve(recipe: str, overrides: Sequence[str]) -> RunConfig:
    """The config of a built-in recipe (by name) or of a recipe folder, with dotted overrides applied.

    Raises ConfigError for an unknown recipe, a file that is not a YAML mapping, and anything that the schema refuses.
    """
    return resolve_written(recipe, overrides)[0]


def resolve_written(recipe: str, overrides: Sequence[str]) -> tuple[RunConfig, WrittenConfig]:
    """The same, and as it is written."""
    folder = recipe_folder(recipe)
    source = folder / "config.yaml"
    return _resolved(read_yaml(source), folder, overrides, str(source))


def resolve_mapping(
    config: Mapping[str, Any], overrides: Sequence[str], source: str
) -> tuple[RunConfig, WrittenConfig]:
    """The same for a mapping with the keys of a ``config.yaml``, and the name or the folder of the recipe as
    ``recipe``. A resolved config resolves to itself."""
    raw = copy.deepcopy(dict(config))
    recipe = raw.pop("recipe", None)
    if not isinstance(recipe, str | Path):
        raise ConfigError(f"{source} has no key recipe: write the name or the folder of one")
    return _resolved(raw, recipe_folder(str(recipe)), overrides, source)


def resolve_file(path: Path, overrides: Sequence[str]) -> tuple[RunConfig, WrittenConfig]:
    """The same for a YAML file. Without the key ``recipe``, its folder is the recipe's."""
    return resolve_mapping({"recipe": path.parent, **read_yaml(path)}, overrides, str(path))


def _resolved(
    raw: dict[str, Any], folder: Path, overrides: Sequence[str], source: str
) -> tuple[RunConfig, WrittenConfig]:
    for override in overrides:
        apply_override(raw, override)
    if "recipe" in raw:
        raise ConfigError(
            "the key recipe can't be set: the recipe is the word without '=' on the command line"
        )
    config, written = _validate({**raw, "recipe": str(folder)}, source)
    config = with_files(config, written, folder)
    check_weights(config.policies, config.seed)
    return config, written


def with_overrides(config: RunConfig, overrides: Sequence[str], source: str) -> RunConfig:
    """A resolved config with dotted overrides applied. Raises as ``resolve`` does; ``source``: its file."""
    raw = config.model_dump(mode="json")
    for override in overrides:
        apply_override(raw, override)
    return check(raw, source)


def override_key(override: str) -> str:
    """Returns the dotted key of an override ``KEY=VALUE``."""
    return override.partition("=")[0]


def check(raw: dict[str, Any], source: str) -> RunConfig:
    """The typed config of a resolved one, which has no defaults. Raises ConfigError listing every problem, each with
    its key and value."""
    if defaults := [key for key in Defaults.model_fields if key in raw]:
        problem = "a resolved config has no defaults: write the keys of single agents and policies"
        raise _refusal(source, [f"{key}: {problem}" for key in defaults])
    return _validate(raw, source)[0]


def _validate(raw: dict[str, Any], source: str) -> tuple[RunConfig, WrittenConfig]:
    written = UNCHANGED
    try:
        written = WrittenConfig.model_validate(raw)
        return RunConfig.model_validate(written.complete()), written
    except ValidationError as error:
        items = error.errors(include_url=False)
        raise _refusal(
            source, [line for item in items for line in problem_text(item, written).splitlines()]
        ) from None


def _refusal(source: str, problems: Sequence[str]) -> ConfigError:
    listed = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
    return ConfigError(f"{source}, overrides included:\n{listed}")


def recipe_folder(recipe: str) -> Path:
    """Finds a recipe: the folder of a built-in one, or a folder by its path. Raises ConfigError if there is
    no recipe."""
    built_in = RECIPES / recipe.replace("-", "_")
    folder = built_in if _RECIPE_NAME.fullmatch(recipe) and built_in.is_dir() else Path(recipe)
    for file in ("config.yaml", "workflow.py"):
        if not (folder / file).is_file():
            names = sorted(p.parent.name.replace("_", "-") for p in RECIPES.glob("*/config.yaml"))
            if folder.is_dir():
                raise ConfigError(
                    f"no recipe {recipe!r}: the folder has no {file}; a recipe has a workflow.py and a config.yaml"
                )
            raise ConfigError(
                f"no recipe {recipe!r}: neither built in ({', '.join(names)}) nor a folder{guess(recipe, names)}"
            )
    return folder.resolve()


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError if it can't be read or holds something else."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path} is invalid YAML: {_yaml_problem(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is invalid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no mapping of keys to values")
    return cast(dict[str, Any], _without_sharing(raw))


def _without_sharing(value: Any) -> Any:
    """A copy in which each place has a value of its own. YAML has one object for an anchor and all of its aliases, and
    a setting for one of these places would be one for all."""
    if isinstance(value, dict):
        return {key: _without_sharing(item) for key, item in value.items()}
    return [_without_sharing(item) for item in value] if isinstance(value, list) else value


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    """Its line first, for a person who has the file open."""
    mark = error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    hint = "; indent with spaces" if "'\\t'" in (error.problem or "") else ""
    return f"{place}{error.problem or error}{hint}"


def to_yaml(config: RunConfig) -> str:
    """Returns the whole config as YAML, defaults included: ``check`` reads the same config from it."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def apply_override(raw: dict[str, Any], override: str) -> None:
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
    names = raw.get(keys[0])
    if kind and len(keys) > 1 and isinstance(names, dict) and keys[1] not in names:
        raise ConfigError(
            f"override {override!r}: there is no {kind} {keys[1]!r}; there are: {', '.join(map(str, names))}"
        )


def flattened(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping by dotted key; an empty section is a value."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
