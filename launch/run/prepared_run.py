"""A run before its first actor starts: its config is resolved and checked, its folder locked."""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ...actors.errors import ConfigError
from ..config.config_reading import (
    check,
    read_yaml,
    recipe_folder,
    resolve_file,
    resolve_mapping,
    resolve_written,
    to_yaml,
    with_overrides,
)
from ..config.config_sections import ChecksConfig
from ..config.run_config import RunConfig
from ..config.written_config import UNCHANGED, WrittenConfig
from ..errors import ResumeRefused
from ..hosts.placement.auto_ranks import is_left_to_the_plan, with_chosen_ranks
from ..hosts.placement.run_placement import like_this_host
from ..run_folder.run_directory import RunDirectory
from . import resuming
from .preflight.preflight import Notify, check_before_start, log_check
from .resuming import StartState

DEFAULT_RECIPE: Final = "sort-digits"

GivenConfig = RunConfig | Mapping[str, Any] | str | Path

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run, checked, whose folder is locked. ``start``: its config and checkpoint. ``environment``: variables of its
    actors, beside this process's."""

    directory: RunDirectory
    start: StartState
    environment: Mapping[str, str]


@contextlib.contextmanager
def new_run(
    config: GivenConfig,
    settings: Sequence[str],
    runs: Path,
    name: str | None,
    notify: Notify = log_check,
    joining: int = 0,
) -> Iterator[PreparedRun]:
    """Makes a new run, whose folder is locked until the end of the context. It takes seconds: the recipe is tried in a
    process of its own. Raises ConfigError with every mistake, RunDirectoryError if the folder exists; in both cases
    nothing is written. ``notify``: see ``check_before_start``. ``joining``: the number of hosts that
    will join, for numbers of ranks that are left to the plan."""
    resolved, folder, environment = validate_new_run(config, settings, runs, name, notify, joining)
    directory = RunDirectory.create(folder, to_yaml(resolved))
    with directory.locked():
        yield PreparedRun(directory, StartState(resolved, None, {}, []), environment)


@contextlib.contextmanager
def resumed_run(
    folder: Path, settings: Sequence[str], accepted: Sequence[str], joining: int = 0
) -> Iterator[PreparedRun]:
    """The run in ``folder``, locked until the end of the context, from its newest checkpoint on. ``settings``,
    ``accepted``, ``joining``: see ``resuming.plan_resume``, whose errors it raises; also RunDirectoryError if the
    folder is not a run's or has a link in it, or the run is running, ResumeRefused if the run is complete."""
    directory = RunDirectory.existing(folder)
    with directory.locked():
        prepared = resume_from_newest_checkpoint(directory, settings, accepted, joining=joining)
        if prepared.start.is_complete:
            complete = f"all {prepared.start.step} steps are trained: training.steps=... adds more"
            raise ResumeRefused(folder, [complete])
        yield prepared


def begun_run(runs: Path, name: str, recipe: str) -> RunDirectory | None:
    """The folder of the run ``name``; None if it has not begun. Raises ConfigError if it is a run of another recipe,
    RunDirectoryError if the folder is not a run's."""
    folder = runs / checked_name(name)
    if not folder.exists():
        return None
    directory = RunDirectory.existing(folder)
    run_recipe = read_yaml(directory.config).get("recipe")
    if run_recipe != str(recipe_folder(recipe)):
        raise ConfigError(f"{folder} is a run of the recipe {run_recipe}: choose another --name")
    return directory


def changed_settings(directory: RunDirectory, recipe: str, settings: Sequence[str]) -> list[str]:
    """The settings that a run of ``recipe`` with ``settings`` would have now and the run in ``directory`` has not, each
    as ``key.key=value``. Numbers that are left to the plan stay those with which the run has begun."""
    before = check(read_yaml(directory.config), str(directory.config))
    now, _ = resolve_written(recipe, settings)
    changes = resuming.differences(before, now).items()
    return [
        f"{key}={json.dumps(value)}" for key, (_, value) in changes if not is_left_to_the_plan(key, value)
    ]


def resume_from_newest_checkpoint(
    directory: RunDirectory,
    settings: Sequence[str],
    accepted: Sequence[str],
    notify: Notify = log_check,
    joining: int = 0,
) -> PreparedRun:
    """Prepares a locked run to continue from its newest checkpoint: removes the lines and files of steps that it
    repeats, unless the run is complete. Raises the errors of ``resuming.plan_resume``, and ConfigError."""
    directory.check_no_links()
    start = resuming.plan_resume(directory, settings, accepted, joining)
    if start.is_complete:
        return PreparedRun(directory, start, {})
    config = start.config
    if start.checkpoint is not None:  # it has played its workflow
        config = config.model_copy(update={"checks": ChecksConfig(trajectory=False)})
    environment = check_before_start(config, UNCHANGED, notify)
    damaged = directory.forget_after(start.step)
    return PreparedRun(directory, replace(start, warnings=start.warnings + damaged), environment)


def validate_new_run(
    config: GivenConfig,
    settings: Sequence[str],
    runs: Path,
    name: str | None,
    notify: Notify = log_check,
    joining: int = 0,
) -> tuple[RunConfig, Path, Mapping[str, str]]:
    """The config, the folder that the run would have, and variables of its actors. Raises as ``new_run`` does."""
    resolved, keys = resolve_given(config, settings)
    resolved = with_chosen_ranks(resolved, partial(like_this_host, joining))
    folder = runs / (default_name(resolved) if name is None else checked_name(name))
    RunDirectory.check_new(folder)
    return resolved, folder, check_before_start(resolved, keys, notify)


def resolve_given(config: GivenConfig, settings: Sequence[str]) -> tuple[RunConfig, WrittenConfig]:
    """The config, and the places at which its values are written. ``settings``: ``key.key=value``, applied to it.

    A text or path names a recipe, its folder, or a file with the keys of ``config.yaml``. A mapping has these keys, and
    the recipe as ``recipe``. Raises ConfigError."""
    if isinstance(config, RunConfig):
        return with_overrides(config, settings, "the given config"), UNCHANGED
    if isinstance(config, Mapping):
        return resolve_mapping(config, settings, "the given config")
    if Path(config).suffix == ".yaml":
        return resolve_file(Path(config), settings)
    return resolve_written(str(config), settings)


def recipe_and_settings(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, None without one, and the settings ``key.key=value`` among the words of a command line. Raises
    ConfigError for more than one recipe."""
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        raise ConfigError(
            f"one recipe at a time, not {' and '.join(recipes)}; settings are written key.key=value"
        )
    return (recipes[0] if recipes else None), [word for word in words if "=" in word]


def default_name(config: RunConfig) -> str:
    """Recipe, time, process, and from this process's second run on a number."""
    number = next(_numbers)
    recipe = Path(config.recipe).name.replace("_", "-")
    words = [recipe, time.strftime("%Y%m%d-%H%M%S"), str(os.getpid())]
    return "-".join([*words, str(number)] if number > 1 else words)


def checked_name(name: str) -> str:
    """``name``. Raises ConfigError if it can't be that of a run's folder."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"--name {name!r}: a run's name is the name of one folder, without control characters, and without "
            "blanks around it; --runs is the folder of all runs"
        )
    return name
