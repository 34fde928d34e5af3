"""Figures that a run has measured of each of its policies, for ``calibration.py``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from .calibration import Measured, Work

_PREFILL: Final = ("engine_prefill_chunks", "engine_computed_tokens", "engine_prefill_s")
_DECODE: Final = ("engine_steps", "engine_decoded_tokens", "engine_decode_s")

_PROMPTS: Final = "actor.engine_prompt_tokens"
_COMPUTED: Final = "actor.engine_computed_tokens"

_LEAST: Final = 3


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """``policies``: those that were computed. ``turn_s``: of a rollout worker's processor for each turn; 0 if it was
    not measured."""

    policies: Sequence[Measured]
    turn_s: float


def measured_run(run: RunDirectory) -> MeasuredRun:
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
    return MeasuredRun(
        [_measurements(config, name, rows) for name in policies], turn_s(rows, [*config.agents])
    )


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
    prompt = mean_prompt(rows, name)
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
        prefill=_of_engines(steady, name, _PREFILL),
        decode=_of_engines(steady, name, _DECODE),
        training=tuple(_training(config, name, row, prompt) for row in steady),
        optimizer_s=min(optimizer, default=0.0),
        versions=len(transfers),
        transfer_s=sum(transfers),
    )


def mean_prompt(rows: Sequence[Mapping[str, Any]], policy: PolicyName) -> float:
    """Mean tokens of the prompts of a policy's first instances, until the last row; 0 if no row has figures of them.

    By the turns of the router: engines and router report at the same moments, which are not those of the steps."""
    for row in reversed(rows):
        tokens = {key: value for key, value in row.items() if key.startswith(f"{_PROMPTS}/{policy}-")}
        turns = sum(row.get(f"actor.turns.{key.removeprefix(f'{_PROMPTS}/')}/router", 0.0) for key in tokens)
        if turns:
            return float(sum(tokens.values()) / turns)
    return 0.0


def computed_share(rows: Sequence[Mapping[str, Any]], policy: PolicyName) -> float | None:
    """Part of the tokens of a policy's prompts that its first instances have computed between the first row and the
    last but one: before and after them are evaluations, whose prompts differ more. None if it was not measured."""
    first, *_, end, _ = rows
    prefix = f"{_PROMPTS}/{policy}-"
    rises = [
        [float(end[of]) - float(first.get(of, 0.0)) for of in (key.replace(_PROMPTS, _COMPUTED), key)]
        for key in end
        if key.startswith(prefix)
    ]
    computed, tokens = map(sum, zip(*rises, strict=True)) if rises else (0.0, 0.0)
    return min(1.0, computed / tokens) if computed and tokens else None


def turn_s(rows: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> float:
    """Seconds of a rollout worker's processor for each turn, the mean between the first row and the last but one."""
    first, *steps, _ = rows
    turns = sum(row.get(f"turns/{agent}", 0.0) for row in steps for agent in agents)
    workers = [key for key in steps[-1] if key.startswith("cpu_s/rollout-")]
    used_s = sum(steps[-1][key] - first.get(key, 0.0) for key in workers)
    return float(used_s / turns) if turns else 0.0


def trained_share(config: RunConfig, name: PolicyName, row: Mapping[str, Any]) -> float:
    """Part of the tokens of a step's samples that training has computed."""
    # Other losses compute the samples alone that have an advantage.
    trains_all = config.policies[name].algorithm.trains_without_advantage
    share = 1.0 if trains_all else float(row.get(f"nonzero_advantage_share/{name}", 1.0))
    return share * (1.0 - float(row.get(f"merged_share/{name}", 0.0)))


def _training(config: RunConfig, name: PolicyName, row: Mapping[str, Any], prompt: float) -> Work:
    """``prompt``: mean tokens of a prompt. A forward for each micro-batch: larger ones take several, each of which is
    full."""
    samples = row.get(f"samples/{name}", 0)
    tokens = samples * (row.get(f"mean_tokens/{name}", 0.0) + prompt) * trained_share(config, name, row)
    return Work(-(-int(samples) // config.training.micro_batch), tokens, row.get(f"backward_s/{name}", 0.0))


def _of_engines(
    rows: Sequence[Mapping[str, Any]], policy: PolicyName, figures: tuple[str, str, str]
) -> tuple[Work, ...]:
    """The increases of the three figures from row to row, a ``Work`` of each instance. Instances are named for the
    policy that they serve first; a process that began again in between counts from its last begin."""
    prefix = f"actor.{figures[-1]}/{policy}-"
    works = []
    for instance in sorted(
        {key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix)}
    ):
        keys = [f"actor.{figure}/{policy}-{instance}" for figure in figures]
        present = [row for row in rows if keys[-1] in row]
        for before, after in pairwise(present):
            rise = [float(after.get(key, 0.0)) - float(before.get(key, 0.0)) for key in keys]
            if rise[-1] > 0 and min(rise) >= 0:
                works.append(Work(*rise))
    return tuple(works)
