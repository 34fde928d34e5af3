"""Resuming a run: its newest checkpoint, and the settings and files that are no longer those that it was made with.

    runs/<name>/made_with.json      the config, and the digests of the recipe's code, of the newest life of the run

A run is resumed with the values that its checkpoint was made with. Some may change (``MAY_CHANGE``): on the command
line, as ``key=value``, never by an edit of ``config.yaml`` alone. A changed file of the recipe is accepted by its name.
The data is compared by the orchestrator, as the recipe's functions return it (``queries/``).
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

import xxhash
from pydantic import TypeAdapter, ValidationError

from ...actors.errors import CheckpointIncomplete, ConfigError
from ...actors.orchestrator import checkpoint
from ...actors.orchestrator.checkpoint import RunState
from ...core.durable.files import replace_private, sync
from ..config.config_reading import check, flattened, override_key, read_yaml, to_yaml, with_overrides
from ..config.run_config import RunConfig
from ..errors import ResumeRefused
from ..hosts.placement.auto_ranks import with_chosen_ranks
from ..hosts.placement.run_placement import like_this_host
from ..run_folder.run_directory import RunDirectory

MAY_CHANGE: Final = (
    "recipe", "training.steps", "training.*_timeout_s", "checkpoint.*", "checks.*", "evaluation.*", "store.*",
    "samples.*", "supervision.*", "router.*", "pool.*", "rollout.max_failed_share", "rollout.trajectory_timeout_s",
    "rollout.turn_timeout_s", "rollout.turn_retries", "rollout.workers", "hosts.*",
    "agents.*.sampling.turn_timeout_s", "policies.*.instances", "policies.*.engine.*", "balance.*", "weights.*",
    "network.*", "page.*", "sinks", "trace.*",
    # These decide what is learned; each step reads them, and nothing in a checkpoint was computed from them.
    "policies.*.optimizer.*", "policies.*.algorithm.clip_low", "policies.*.algorithm.clip_high",
    "policies.*.algorithm.options.*",
    "policies.*.algorithm.critic.lr", "policies.*.algorithm.critic.max_grad_norm",
)  # fmt: skip
"""Keys that decide how long a run lasts, how it is watched, the machine's share of it, and how far each of the steps
that follow may go."""

DATA: Final = "data"
"""The name by which changed data is accepted."""

_ABSENT: Final = "(absent)"
_DEPTH: Final = 3

Change = tuple[Any, Any]
"""The old and the new value."""


@dataclass(frozen=True, slots=True)
class MadeWith:
    """``config``: as in ``config.yaml``. ``files``: name within the recipe's folder -> digest of its content."""

    config: dict[str, Any]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class StartState:
    """The config of a run, and the place from which it begins. ``checkpoint``: folder and state; None for a new run,
    and for one that starts again at the first step. ``changes``: since the checkpoint was made, by key or file, as
    text."""

    config: RunConfig
    checkpoint: tuple[Path, RunState] | None
    changes: dict[str, str]
    warnings: list[str]

    @property
    def step(self) -> int:
        """The last step that is kept."""
        return self.checkpoint[1].step if self.checkpoint else 0

    @property
    def is_complete(self) -> bool:
        """True if the checkpoint is of the last step that the config asks for: there is nothing to resume. Without
        steps it is made before the only evaluation, which may have been stopped."""
        return self.checkpoint is not None and self.step >= self.config.training.steps > 0

    @property
    def place(self) -> str:
        """The place of the checkpoint in the run, in words."""
        return f"step {self.step}" if self.step else "the supervised batches"


def plan_resume(
    directory: RunDirectory, overrides: Sequence[str], accepted: Sequence[str], joining: int = 0
) -> StartState:
    """The run as it is to be continued; changes no file but partial checkpoints, which are removed. ``joining``: the
    number of hosts that will join, for numbers of ranks that are left to the plan.

    Raises ResumeRefused naming everything that has changed and was not accepted, ConfigError if the config is invalid,
    CheckpointIncomplete naming the damaged file: the user decides about an older checkpoint.
    """
    newest = _newest(directory)
    written = _relocate(_with_renderers(check(read_yaml(directory.config), str(directory.config))), overrides)
    made_with = _made_with(directory)
    warnings = _warnings(directory, newest is not None, made_with)
    if newest is None or made_with is None:
        config = _with_settings(written, overrides, str(directory.config), joining)
        return StartState(config, newest, _as_text(differences(written, config)), warnings)
    source = str(directory.made_with)
    before = _relocate(_with_renderers(check(made_with.config, str(directory.made_with))), overrides)
    config = _with_settings(before, overrides, source, joining)
    problems = list(_refused_settings(before, config, written, overrides, directory.path))
    if config.training.steps < newest[1].step:
        problems.append(
            f"training.steps={config.training.steps}: step {newest[1].step} is trained already: write more"
        )
    files = changed_files(made_with.files, recipe_files(config))
    problems += [
        f"{name} of the recipe {config.recipe} {how} since the checkpoint was made: restore it, or continue with it by "
        f"--accept {name}"
        for name, how in files.items()
        if name not in accepted
    ]
    if problems:
        raise ResumeRefused(directory.path, problems)
    changes = _as_text(differences(before, config)) | files
    if DATA in accepted:
        newest = newest[0], replace(newest[1], queries=newest[1].queries.without_digests())
        changes[DATA] = "not compared"
    return StartState(config, newest, changes, warnings)


def _with_renderers(config: RunConfig) -> RunConfig:
    """A run records every key. Without ``model.renderer`` its messages became tokens by the chat template; the default
    of today could give its prompts other tokens between two steps."""
    policies = dict(config.policies)
    for name, policy in config.policies.items():
        if policy.model is not None and "renderer" not in policy.model.model_fields_set:
            model = policy.model.model_copy(update={"renderer": "template"})
            policies[name] = policy.model_copy(update={"model": model})
    return config.model_copy(update={"policies": policies})


def _with_settings(config: RunConfig, overrides: Sequence[str], source: str, joining: int) -> RunConfig:
    """``config`` with ``overrides``; numbers that they leave to the plan are chosen for this host and those that
    join."""
    return with_chosen_ranks(with_overrides(config, overrides, source), partial(like_this_host, joining))


def _relocate(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Models and tokenizers in the recipe's folder have moved with it, if ``overrides`` name another folder."""
    moves = [override.partition("=")[2] for override in overrides if override_key(override) == "recipe"]
    if not moves:
        return config
    raw = config.model_dump(mode="json")
    old, new = Path(config.recipe), Path(moves[-1]).resolve()
    for policy in raw["policies"].values():
        model = policy.get("model") or {}
        for part in ("path", "tokenizer"):
            file = Path(model.get(part) or "")
            if file.is_relative_to(old) and (moved := new / file.relative_to(old)).exists():
                model[part] = str(moved)
    return check(raw, "the recipe's new folder")


def record(directory: RunDirectory, config: RunConfig) -> None:
    """Writes ``made_with.json``, and ``config.yaml`` again if it differs; each changes as a whole or not at all, also
    if the host loses its power: no checkpoint can be resumed without them."""
    text = to_yaml(config)
    if not directory.config.exists() or directory.config.read_text(encoding="utf-8") != text:
        replace_private(directory.config, text.encode(), durable=True)
    made_with = MadeWith(config.model_dump(mode="json"), recipe_files(config))
    content = TypeAdapter(MadeWith).dump_json(made_with, indent=2) + b"\n"
    replace_private(directory.made_with, content, durable=True)
    sync(directory.path)


def _made_with(directory: RunDirectory) -> MadeWith | None:
    """None if the file is missing. Raises CheckpointIncomplete if it is damaged."""
    try:
        return TypeAdapter(MadeWith).validate_json(directory.made_with.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise CheckpointIncomplete(
            directory.made_with,
            f"is damaged ({error.errors()[0]['msg']}): remove it to continue with config.yaml and the recipe as they "
            "are now",
        ) from None


def _warnings(directory: RunDirectory, has_checkpoint: bool, made_with: MadeWith | None) -> list[str]:
    warnings = []
    if has_checkpoint and made_with is None:
        warnings.append(
            f"{directory.made_with} is missing: the config and the recipe can't be compared with those that the "
            "checkpoint was made with, and are used as they are now"
        )
    if has_checkpoint and not directory.store.exists():
        warnings.append(
            f"{directory.store} is missing: no sample of a saved step is lost, those of later steps are generated again"
        )
    return warnings


def _newest(directory: RunDirectory) -> tuple[Path, RunState] | None:
    """The newest checkpoint. Raises CheckpointIncomplete with the damaged file."""
    checkpoint.remove_partial(directory.checkpoints)
    folders = checkpoint.complete(directory.checkpoints)
    if not folders:
        return None
    try:
        return folders[-1], checkpoint.load(folders[-1])
    except CheckpointIncomplete as error:
        older = f"continue from {folders[-2].name}" if len(folders) > 1 else "start again from step 1"
        raise CheckpointIncomplete(error.path, f"{error.problem}; remove {folders[-1]} to {older}") from None


# --------------------------------------------------------------------------- settings


def differences(old: RunConfig, new: RunConfig) -> dict[str, Change]:
    """The dotted keys whose values differ."""
    before, after = dict(flattened(old.model_dump(mode="json"))), dict(flattened(new.model_dump(mode="json")))
    return {
        key: (before.get(key, _ABSENT), after.get(key, _ABSENT))
        for key in {**before, **after}
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    }


def may_change(key: str) -> bool:
    """True if a resumed run may have another value for this dotted key than its checkpoint was made with."""
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)


def _refused_settings(
    before: RunConfig, after: RunConfig, written: RunConfig, overrides: Sequence[str], run: Path
) -> Iterator[str]:
    """``after``: ``before`` with the overrides; ``written``: ``config.yaml`` as it is now."""
    for key, (old, new) in differences(before, after).items():
        if not may_change(key):
            yield (
                f"{key}={new!r} was {old!r} when the checkpoint was made, and can't change in a resumed run: leave it "
                f"out, or start a new run; these may change: {', '.join(MAY_CHANGE)}"
            )
    override_keys = [override_key(override) for override in overrides]
    for key, (old, new) in differences(before, written).items():
        if any(key == name or key.startswith(f"{name}.") for name in override_keys):
            continue
        way = (
            f"take it by flexmarl train --resume {shlex.quote(str(run))} {shlex.quote(f'{key}={new}')}, or "
            if may_change(key)
            else ""
        )
        yield f"{key}={new!r} in config.yaml was {old!r} when the checkpoint was made: {way}restore it"


def _as_text(changes: Mapping[str, Change]) -> dict[str, str]:
    return {key: f"{old} -> {new}" for key, (old, new) in changes.items()}


# --------------------------------------------------------------------------- the recipe's code


def recipe_files(config: RunConfig) -> dict[str, str]:
    """The digests of the Python files in the recipe's folder, down to three folders below it, by their names there."""
    folder = Path(config.recipe)
    if not folder.is_dir():
        raise ConfigError(
            f"the recipe's folder {folder} is missing: restore it, or write its new place: recipe=FOLDER"
        )
    return code_digests(folder)


def code_digests(folder: Path) -> dict[str, str]:
    """As ``recipe_files``; empty without that folder."""
    return {
        str(path.relative_to(folder)): xxhash.xxh3_64_hexdigest(path.read_bytes())
        for path in sorted(_python_files(folder))
    }


def _python_files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = [
            name for name in folders if depth < _DEPTH and name != "__pycache__" and not name.startswith(".")
        ]
        yield from (Path(place) / name for name in names if name.endswith(".py"))


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The files that have changed, with how. New ones change nothing: an old one would have to import them."""
    return {
        name: "has changed" if name in now else "is missing"
        for name, digest in before.items()
        if now.get(name) != digest
    }
