"""Figures that a run has measured of each of its policies, for ``calibration.py``."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from ...actors.errors import ConfigError
from ...actors.inference.inference_config import EmbeddedEngineConfig, VllmEngineConfig
from ...actors.names import PolicyName
from ...actors.trainer.backends.backend_config import TorchTrainerConfig
from ..config.config_reading import check, read_yaml
from ..config.run_config import RunConfig
from ..hosts.placement.model_memory import ITEM_BYTES, shape_of_model, unknown_shape
from ..run_folder.json_lines import read_lines
from ..run_folder.run_directory import RunDirectory
from .calibration import Measured

_OF_ENGINES: Final = {
    "prompt_tokens": "engine_prompt_tokens", "prefill_s": "engine_prefill_s", "decode_steps": "engine_steps",
    "decoded_tokens": "engine_decoded_tokens", "decode_s": "engine_decode_s",
}  # fmt: skip

_LEAST: Final = 3


def measured_run(run: RunDirectory) -> list[Measured]:
    """Raises ConfigError for a run that has computed nothing, or whose models are not known here."""
    config = check(read_yaml(run.config), str(run.config))
    rows, _ = read_lines(run.metrics) if run.metrics.exists() else ([], 0)
    if len(rows) < _LEAST:
        raise ConfigError(
            f"{run.path} has {len(rows)} complete steps: {_LEAST} are needed, as the first is a warm-up"
        )
    policies = [name for name, policy in config.policies.items() if _is_real(config, name)]
    if not policies:
        raise ConfigError(
            f"{run.path} has simulated policies alone: nothing was computed that could be measured"
        )
    return [_measurements(config, name, rows) for name in policies]


def _is_real(config: RunConfig, name: PolicyName) -> bool:
    return isinstance(config.policies[name].engine, VllmEngineConfig | EmbeddedEngineConfig)


def _measurements(config: RunConfig, name: PolicyName, rows: Sequence[Mapping[str, Any]]) -> Measured:
    policy = config.policies[name]
    shape = shape_of_model(policy.real_model)
    if shape is None:
        raise ConfigError(unknown_shape(config, name))
    trainer = policy.trainer
    # The first has compilations, first uses of everything, and the evaluation before it.
    steady = rows[1:]
    prompts = _of_engines(steady, name, "engine_prompt_tokens")
    turns = sum(row.get(f"turns/{agent}", 0) for row in steady[1:] for agent in config.agents_of(name))
    prompt = prompts / turns if turns else 0.0
    # Other losses compute the samples alone that have an advantage.
    trains_all = policy.algorithm.trains_without_advantage
    trained = sum(
        row.get(f"samples/{name}", 0)
        * (row.get(f"mean_tokens/{name}", 0.0) + prompt)
        * (1 - row.get(f"merged_share/{name}", 0.0))
        * (1.0 if trains_all else row.get(f"nonzero_advantage_share/{name}", 1.0))
        for row in steady
    )
    transfers = [row[key] for row in steady if (key := f"transfer_mean_s/{name}") in row]
    # Without its wait for slots and the weights that it makes ready, as ``optimizer_s`` has them. An update that was
    # skipped takes no time.
    optimizer = [
        row[key]
        for row in steady
        if (key := f"update_s/{name}") in row and not row.get(f"skipped_updates/{name}")
    ]
    return Measured(
        shape=shape,
        ranks=trainer.most_ranks if isinstance(trainer.ranks, int) else 1,
        devices=policy.engine.devices,
        item_bytes=ITEM_BYTES[policy.real_model.dtype],
        checkpoints=isinstance(trainer, TorchTrainerConfig) and trainer.activation_checkpointing,
        trained_tokens=trained,
        forwards=_forwards(config, name, steady),
        backward_s=sum(row.get(f"backward_s/{name}", 0.0) for row in steady),
        optimizer_s=min(optimizer, default=0.0),
        versions=len(transfers),
        transfer_s=sum(transfers),
        **{field: _of_engines(steady, name, figure) for field, figure in _OF_ENGINES.items()},
    )


def _forwards(config: RunConfig, name: PolicyName, rows: Sequence[Mapping[str, Any]]) -> float:
    """One for each micro-batch: larger ones take several, each of which is full."""
    size = config.training.micro_batch
    return float(sum(-(-int(row.get(f"samples/{name}", 0)) // size) for row in rows))


def _of_engines(rows: Sequence[Mapping[str, Any]], policy: PolicyName, figure: str) -> float:
    """The increase of a figure over these rows, the sum over the policy's instances. They are named for
    the policy that they serve first; a process that began again in between counts from its last begin."""
    total, prefix = 0.0, f"actor.{figure}/{policy}-"
    for key in {key for row in rows for key in row if key.startswith(prefix)}:
        values = [float(row[key]) for row in rows if key in row]
        rises = (after - before for before, after in pairwise(values))
        total += sum(rise for rise in rises if rise > 0)
    return total
