"""The files of a config: models, tokenizers, and the weights of another run that policies start from.

    init_from=runs/first            the newest checkpoint, for every policy the one of its name
    init_from=runs/first/120        the checkpoint after step 120
    agents.solver.init_from=...     one policy

The resolved config has absolute paths, and the folder of the policy in the checkpoint: a resumed run does not look for
a newer one.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...actors.errors import CheckpointIncomplete, CheckpointMismatch, ConfigError
from ...actors.json_files import read_json
from ...actors.messages import ModelConfig
from ...actors.names import PolicyName
from ...actors.trainer.backends.simulated_policy import STATE_FILE as SIMULATED_FILE
from ...actors.trainer.saved_policy import ADAPTER_FILE, POSITION_FILE, WEIGHTS_FILE
from ..errors import RunDirectoryError
from ..run_folder.run_directory import RunDirectory
from ..run_folder.saved_policies import policies_of, saved_policy
from .config_sections import PolicyConfig
from .run_config import RunConfig
from .written_config import WrittenConfig


def with_files(config: RunConfig, written: WrittenConfig, folder: Path) -> RunConfig:
    """The same with absolute paths, each in the recipe's ``folder`` or else in the working directory.

    Raises ConfigError if a path leads nowhere, or ``init_from`` to no saved policy.
    """
    policies = {}
    for name, policy in config.policies.items():
        files: dict[str, Any] = {}
        if policy.model is not None:
            files["model"] = _with_absolute_paths(policy.model, name, written, folder)
        if policy.init_from is not None:
            files["init_from"] = _written_weights(policy.init_from, name, written, folder)
        policies[name] = policy.model_copy(update=files)
    return config.model_copy(update={"policies": policies})


def _with_absolute_paths(
    model: ModelConfig, policy: PolicyName, written: WrittenConfig, folder: Path
) -> ModelConfig:
    """A name that is not a file, and is not written as a path, is taken for a hub's."""
    paths: dict[str, str] = {}
    for part, name in (("path", model.path), ("tokenizer", model.tokenizer)):
        if name is None:
            continue
        places = [folder / name, Path(name).expanduser()]
        if place := next((place for place in places if place.exists()), None):
            paths[part] = str(place.resolve())
        elif name.startswith(("/", "./", "../", "~")):
            key = written.key("policies", policy, "model", part)
            raise ConfigError(f"{key}={name!r}: there is no such file or folder")
    return model.model_copy(update=paths)


def _written_weights(path: Path, policy: PolicyName, written: WrittenConfig, folder: Path) -> Path:
    try:
        return saved_weights(path, policy, folder)
    except (RunDirectoryError, CheckpointIncomplete) as error:
        key = written.key("policies", policy, "init_from")
        raise ConfigError(f"{key}={str(path)!r}: {error}") from None


def check_weights(policies: Mapping[PolicyName, PolicyConfig], seed: int) -> None:
    """Compares names and shapes of the weights with those of each policy's model, and an adapter's random base with the
    one that ``seed``, the run's, makes.

    Raises ConfigError if they differ, or if the model can't be made. Takes seconds if there are any, as it imports
    torch.
    """
    for name, policy in policies.items():
        if policy.init_from is None:
            continue
        if not policy.simulated:
            _check_adapter(name, policy.init_from, policy)
        kind = SIMULATED_FILE if policy.simulated else _weights_file(policy)
        if not (policy.init_from / kind).exists():
            model_kind, weights_kind = ("is", "is not") if policy.simulated else ("is not", "is")
            raise ConfigError(
                f"init_from of policy {name}: its model {model_kind} simulated, and the one in {policy.init_from} "
                f"{weights_kind}"
            )
        if not policy.simulated:
            _check_tensors(name, policy.init_from, policy)
            _check_base(name, policy.init_from, policy, seed)


def _weights_file(policy: PolicyConfig) -> str:
    return WEIGHTS_FILE if policy.lora is None else ADAPTER_FILE


def _check_adapter(name: str, saved: Path, policy: PolicyConfig) -> None:
    """Raises ConfigError if one of the two is an adapter, and the other a whole model."""
    if policy.lora is None and (saved / ADAPTER_FILE).exists():
        raise ConfigError(
            f"init_from of policy {name}: {saved} holds a LoRA adapter: add the section `lora` to the policy, or name "
            "a whole model"
        )
    if policy.lora is not None and (saved / WEIGHTS_FILE).exists():
        raise ConfigError(
            f"init_from of policy {name}: {saved} holds a whole model, and the policy is a LoRA adapter: to adapt that "
            "model, write `model: {path: ...}` with the folder that `flexmarl export` makes of it"
        )


def _check_tensors(name: str, saved: Path, policy: PolicyConfig) -> None:
    from ...actors.pretrained import named_weights_of
    from ...actors.trainer.policy_files import check_tensors

    try:
        if policy.lora is None:
            check_tensors(saved / WEIGHTS_FILE, named_weights_of(policy.real_model))
        else:
            from ...actors.trainer.backends.torch_policy.adapters import check_adapter

            check_adapter(saved, policy.real_model, policy.lora)
    except (CheckpointIncomplete, CheckpointMismatch, OSError, ValueError) as error:
        raise ConfigError(f"init_from of policy {name} does not fit its model: {error}") from None


def _check_base(name: str, saved: Path, policy: PolicyConfig, seed: int) -> None:
    """Raises ConfigError if the adapter is over other random weights. An exported one does not name its base."""
    if policy.lora is None or policy.real_model.config is None or not (saved / POSITION_FILE).exists():
        return
    base = read_json(saved / POSITION_FILE).get("base")
    if isinstance(base, dict) and base.get("seed") != policy.real_model.weights_seed(seed):
        raise ConfigError(
            f"init_from of policy {name}: its adapter is over other random weights than those that this run makes of "
            f"seed={seed} and the model's config: write the seed and the model of the run that it comes from"
        )


def saved_weights(path: Path, policy: str, folder: Path = Path()) -> Path:
    """The absolute folder of the weights that ``policy`` starts from. ``path``: a run, ``RUN/STEP``, or a folder, also
    relative to ``folder``. Raises RunDirectoryError, CheckpointIncomplete."""
    places = [path.expanduser(), folder / path]
    for place in places:
        if any((place / file).exists() for file in (WEIGHTS_FILE, ADAPTER_FILE, SIMULATED_FILE)):
            return place.resolve()  # a saved policy, as a resolved config has it
    for place in places:
        if place.is_dir():
            return _find_saved(RunDirectory.existing(place), policy, None).resolve()
        if place.name.isdecimal() and place.parent.is_dir():
            return _find_saved(RunDirectory.existing(place.parent), policy, int(place.name)).resolve()
    raise RunDirectoryError("there is no such run: write RUN_DIR, or RUN_DIR/STEP for one of its checkpoints")


def _find_saved(directory: RunDirectory, policy: str, step: int | None) -> Path:
    """The policy of that name, or the only one that the run has."""
    policies: Iterable[str] = policies_of(directory, step)
    only, *more = policies
    return saved_policy(directory, policy if policy in policies or more else only, step)
