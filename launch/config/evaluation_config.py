"""The config of an evaluation alone: that of a run or a recipe, with fixed weights and without a step.

    flexmarl eval runs/first          policies.sorter: {train: false, init_from: runs/first/checkpoints/...}
    flexmarl eval models/sorter ...   policies.sorter: {train: false, model: {path: models/sorter}}

An evaluation is an ordinary run: its prompts, engines, sampling, placement and records are those of training.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...actors.errors import ConfigError
from ...actors.names import PolicyName
from ...actors.trainer.saved_policy import ADAPTER_FILE
from ..errors import RunDirectoryError
from ..run_folder.run_directory import RunDirectory
from .config_reading import check, read_yaml, resolve_written, with_overrides
from .config_sections import OF_TRAINING
from .model_files import saved_weights
from .run_config import RunConfig

_NEVER_S: Final = 1e9
_OF_TRAINED_AGENTS: Final = ("algorithm", "columns")


def evaluation_config(
    source: Path,
    recipe: str | None,
    settings: list[str],
    repeats: int | None,
    weights: Path | None = None,
) -> RunConfig:
    """``source``: a run, ``RUN/STEP`` for one of its checkpoints, or a folder of ``flexmarl export`` or of the hub,
    which needs a ``recipe``. Without ``recipe``: the run's, with its settings. ``settings``: ``key.key=value``.
    ``repeats``: trajectories of a query. ``weights``: as a ``source``, which has them in place of it. Raises
    ConfigError."""
    settings = [*settings, *([] if repeats is None else [f"evaluation.repeats={repeats}"])]
    if recipe is not None:
        config, _ = resolve_written(recipe, [*settings])
    elif (run := _run_of(source)) is not None:
        config = with_overrides(check(read_yaml(run.config), str(run.config)), settings, str(run.config))
    elif not source.exists():
        raise ConfigError(f"{source}: there is no such run or model")
    else:
        raise ConfigError(f"{source} is not a run: name the recipe that it is to be evaluated on by --recipe")
    raw = config.model_dump(mode="json")
    for name in config.trained:
        raw["policies"][name] |= _weights(weights or source, name, raw["policies"][name])
    raw["rollout"]["explorations"] = None
    for name, policy in config.policies.items():
        if policy.explores is not None:
            raw["policies"].pop(name)
            continue
        raw["policies"][name] = _frozen(raw["policies"][name])
        if policy.pool_of is not None:  # plays as its policy does now: there is no past in an evaluation
            raw["policies"][name] |= _weights_of(raw["policies"][policy.pool_of.policy]) | {"pool_of": None}
    for agent in raw["agents"].values():
        for key in _OF_TRAINED_AGENTS:
            agent.pop(key, None)
    raw["training"]["steps"] = 0
    raw.pop("pool")  # of training
    return check(raw, f"the evaluation of {source}")


def serving_config(
    source: Path, recipe: str | None, settings: list[str], listen: str, key_file: Path | None
) -> RunConfig:
    """The config of a run that serves the policies in ``source``: as ``evaluation_config``. Raises ConfigError."""
    raw = evaluation_config(source, recipe, settings, None).model_dump(mode="json")
    raw["gateway"] |= {"serves": True, "listen": listen, "key_file": key_file}
    raw["checks"]["trajectory"] = False
    raw["supervision"]["stall_s"] = _NEVER_S  # without requests nothing ends
    return check(raw, f"the serving of {source}")


def _run_of(source: Path) -> RunDirectory | None:
    for folder in (source, source.parent):
        try:
            return RunDirectory.existing(folder)
        except RunDirectoryError:
            continue
    return None


def _weights(source: Path, policy: PolicyName, section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a policy that give it the weights in ``source``."""
    if (source / "config.json").exists() and not (source / ADAPTER_FILE).exists():
        model = {**(section["model"] or {}), "path": str(source.resolve()), "config": None, "tokenizer": None}
        return {"model": model, "lora": None, "init_from": None}
    try:
        return {"init_from": str(saved_weights(source, policy))}
    except RunDirectoryError as error:
        raise ConfigError(f"{source}: {error}") from None


def _frozen(section: Mapping[str, Any]) -> dict[str, Any]:
    """The same policy without training."""
    kept = {key: value for key, value in section.items() if key not in (*OF_TRAINING, "trainer")}
    trainer = section.get("trainer", {})
    return {**kept, **({"trainer": trainer} if trainer.get("name") == "simulated" else {}), "train": False}


def _weights_of(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: section[key] for key in ("model", "lora", "init_from") if key in section}
