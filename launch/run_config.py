"""The run's configuration: a recipe's YAML, dotted overrides, and the schema that both are checked against.

    resolve("sort-digits", ["training.steps=10", "agents.sorter.instances=2"])  ->  RunConfig

A run directory keeps the resolved config as ``config.yaml``, which resolves to itself.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import numpy as np
import yaml
from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from ..actors.config_base import Config, Count, Natural
from ..actors.declared_columns import Column, check_names, common_types
from ..actors.errors import ConfigError
from ..actors.inference.engines.simulated_engine import SimulatedEngineConfig
from ..actors.inference.inference_config import EngineConfig
from ..actors.messages import MOST_VERSION_CHANGES, ModelConfig
from ..actors.orchestrator.orchestrator_config import (
    CheckpointConfig,
    EvaluationConfig,
    ScheduleConfig,
    TrainingConfig,
)
from ..actors.orchestrator.pipeline import Mode
from ..actors.rollout.rollout_config import RolloutConfig, SamplingConfig
from ..actors.store.store_config import StoreConfig
from ..actors.store_client import ARRAY_COLUMNS, SCALAR_COLUMNS
from ..actors.trainer.algorithms import sync_warning
from ..actors.trainer.backends.simulated_policy import SimulatedTrainerConfig
from ..actors.trainer.trainer_config import AlgorithmConfig, OptimizerConfig, PolicyConfig, SftConfig
from ..actors.workflow import RecipeConfig

RECIPES = Path(__file__).parent / "recipes"
_RECIPE_NAME = re.compile(r"[a-z0-9_-]+")
_AGENT_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@contextmanager
def _config_errors() -> Iterator[None]:
    """Within a validator: ConfigErrors become what pydantic adds the key to."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from None


class AgentConfig(Config):
    """One agent, with a policy of its own. ``instances`` engines generate for it.

    ``global_batch``: samples of one optimizer step, by default all of a step's queries. A number is for ``async``: what
    a step has beyond it is carried to the next, at most once; where there are fewer the agent waits for more.
    ``columns``: of its samples, by name, beyond those that training needs; the workflow fills them by ``Turn.write``.
    """

    model: ModelConfig
    instances: Count = 1
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sft: SftConfig = SftConfig()
    global_batch: Count | None = None
    columns: Annotated[dict[str, Column], Field(default_factory=dict)]

    @field_validator("columns")
    @classmethod
    def _column_names(cls, columns: dict[str, Column]) -> dict[str, Column]:
        with _config_errors():
            check_names(columns, (*SCALAR_COLUMNS, *ARRAY_COLUMNS))
        for name, column in columns.items():
            if column.type == "tensor" and column.dtype is not None and column.dtype not in np.sctypeDict:
                raise ValueError(
                    f"column {name!r}: NumPy has no {column.dtype}, so that no workflow could write it"
                )
        return columns

    @property
    def simulated(self) -> bool:
        """Generating and training take time and nothing else, for tests and measurements: ``model.config`` is
        ``{model_type: simulated, engine: {...}, trainer: {...}}``."""
        return self.model.config is not None and self.model.config["model_type"] == "simulated"

    @model_validator(mode="after")
    def _simulation_is_known(self) -> "AgentConfig":
        if self.simulated and self.model.config is not None:
            SimulatedEngineConfig.model_validate(self.model.config.get("engine", {}))
            SimulatedTrainerConfig.model_validate(self.model.config.get("trainer", {}))
        return self

    def policy(self, max_staleness: int = 0) -> PolicyConfig:
        return PolicyConfig(
            model=self.model,
            optimizer=self.optimizer,
            algorithm=self.algorithm.with_constant_length(self.sampling.max_new_tokens),
            sft=self.sft,
            temperature=self.sampling.temperature,
            max_staleness=max_staleness,
        )


class RunConfig(Config):
    """Everything a run depends on. ``mode``: ``strict`` (rollout and training of a step overlap, strictly
    on-policy), ``sync`` (a barrier between them) or ``async`` (rollout runs up to ``max_staleness`` steps ahead, by
    default 1 and at most 16, and samples are trained by a policy at most that many versions newer than the one that
    generated their first token: AReaL, arXiv 2505.24298, section 5.1). ``deterministic``: two runs with the same seed,
    or one and its resumed halves, have bit-equal losses."""

    recipe: str
    seed: Annotated[Natural, Field(lt=2**63)] = 0
    mode: Mode = "strict"
    max_staleness: Annotated[Count, Field(le=MOST_VERSION_CHANGES)] | None = None
    deterministic: bool = False
    data: Annotated[dict[str, JsonValue], Field(default_factory=dict)]
    agents: Annotated[dict[str, AgentConfig], Field(min_length=1)]
    training: TrainingConfig
    rollout: RolloutConfig = RolloutConfig()
    store: StoreConfig = StoreConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @field_validator("agents")
    @classmethod
    def _names(cls, agents: dict[str, AgentConfig]) -> dict[str, AgentConfig]:
        for name in agents:
            if not _AGENT_NAME.fullmatch(name):
                raise ValueError(
                    f"agent name {name!r}: lower-case letters, digits and _, at most 32, a letter first"
                )
            if name == "metrics":
                raise ValueError("agent name 'metrics' is taken: Rewards(metrics=...) means something else")
        return agents

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> "RunConfig":
        trajectories = self.training.queries_per_step * self.training.trajectories_per_query
        if self.training.micro_batch > trajectories:
            raise ValueError(
                f"training.micro_batch={self.training.micro_batch} is more than the {trajectories} trajectories of a "
                "step (queries_per_step x trajectories_per_query): nothing could overlap"
            )
        return self

    @model_validator(mode="after")
    def _only_async_is_stale(self) -> "RunConfig":
        if self.mode == "async":
            return self
        if self.max_staleness is not None:
            raise ValueError(
                f"max_staleness={self.max_staleness} is for mode=async; in mode={self.mode} every sample is trained by "
                "the version that generated it"
            )
        for name, agent in self.agents.items():
            if agent.global_batch is not None:
                raise ValueError(
                    f"agents.{name}.global_batch={agent.global_batch} is for mode=async: what a step has beyond it is "
                    f"carried to the next step and is stale there, which mode={self.mode} rules out. Without it the "
                    "agent's batch is all samples of a step's queries"
                )
        return self

    @model_validator(mode="after")
    def _time_decides_nothing(self) -> "RunConfig":
        if not self.deterministic:
            return self
        if self.mode == "async":
            raise ValueError(
                "deterministic=true is for strict and sync: under async, time decides which version generates"
            )
        if self.rollout.extra_trajectories:
            raise ValueError(
                f"rollout.extra_trajectories={self.rollout.extra_trajectories} takes the trajectories that end first, "
                "which deterministic=true rules out"
            )
        for name, agent in self.agents.items():
            if late := [column for column, declared in agent.columns.items() if declared.awaited]:
                raise ValueError(
                    f"agents.{name}.columns.{late[0]} is required and written_by external: when it is written decides "
                    "which samples are trained together, which deterministic=true rules out"
                )
        return self

    @model_validator(mode="after")
    def _global_batch_fits(self) -> "RunConfig":
        for name, agent in self.agents.items():
            if agent.global_batch is not None and agent.global_batch < self.training.micro_batch:
                raise ValueError(
                    f"agents.{name}.global_batch={agent.global_batch} is less than "
                    f"training.micro_batch={self.training.micro_batch}: a micro-batch is a part of it"
                )
            if agent.global_batch is not None and agent.algorithm.compares_within_batch:
                raise ValueError(
                    f"agents.{name}.global_batch={agent.global_batch} cuts through groups, whose KL "
                    f"{agent.algorithm.name} compares: leave it out, or set kl_in_reward=false"
                )
        return self

    @model_validator(mode="after")
    def _group_fits(self) -> "RunConfig":
        wanted, minimum = self.training.trajectories_per_query, self.rollout.min_trajectories
        if minimum > wanted:
            raise ValueError(
                f"rollout.min_trajectories={minimum} is more than training.trajectories_per_query={wanted}: every "
                "group would be dropped"
            )
        return self

    @model_validator(mode="after")
    def _groups_compare(self) -> "RunConfig":
        for name, agent in self.agents.items():
            compares = agent.algorithm.row.baseline in ("group_mean", "leave_one_out")
            if compares and self.training.trajectories_per_query == 1:
                raise ValueError(
                    f"training.trajectories_per_query=1: agents.{name}.algorithm.name={agent.algorithm.name} compares "
                    "the trajectories of a query, so that it wants 2 or more; ppo and reinforce_pp do with one"
                )
            if not compares and self.rollout.drop_zero_advantage:
                raise ValueError(
                    f"rollout.drop_zero_advantage is for algorithms that compare a group's rewards: "
                    f"agents.{name}.algorithm.name={agent.algorithm.name} learns where they are equal too"
                )
        return self

    @model_validator(mode="after")
    def _columns_agree(self) -> "RunConfig":
        with _config_errors():
            common_types(self.columns())
        return self

    def columns(self) -> dict[str, dict[str, Column]]:
        """Those that the run declares, by agent."""
        return {name: agent.columns for name, agent in self.agents.items()}

    @property
    def staleness(self) -> int:
        """The most versions that a sample may be older than the policy that it trains."""
        return (self.max_staleness or 1) if self.mode == "async" else 0

    def policies(self) -> dict[str, PolicyConfig]:
        """What the trainer is told of each agent's policy."""
        return {name: agent.policy(self.staleness) for name, agent in self.agents.items()}

    @model_validator(mode="after")
    def _all_simulated_or_none(self) -> "RunConfig":
        if len({agent.simulated for agent in self.agents.values()}) > 1:
            raise ValueError(
                "some agents' models are simulated and others are not: one trainer trains all of them"
            )
        return self

    def warnings(self) -> list[str]:
        """What the person who starts the run should know of it."""
        told = []
        if self.deterministic and any(agent.engine.max_batch > 1 for agent in self.agents.values()):
            told.append(
                "deterministic: engines generate one turn at a time: turns that are computed together round together"
            )
        for name, agent in self.agents.items():
            reason = agent.algorithm.whole_batch_reason
            if reason is not None and self.mode != "sync":
                told.append(sync_warning(name, agent.algorithm.name, reason))
            if self.mode == "async" and agent.algorithm.correction == "none":
                told.append(
                    f"agent {name}: samples that are older than the policy are trained as if they were not; "
                    f"agents.{name}.algorithm.correction=decoupled accounts for that (AReaL, arXiv 2505.24298)"
                )
        return told

    @property
    def simulated(self) -> bool:
        return all(agent.simulated for agent in self.agents.values())

    def schedule(self) -> ScheduleConfig:
        return ScheduleConfig(
            mode=self.mode,
            deterministic=self.deterministic,
            max_staleness=self.staleness,
            global_batch={
                name: agent.global_batch
                for name, agent in self.agents.items()
                if agent.global_batch is not None
            },
            whole_step=tuple(name for name, agent in self.agents.items() if not agent.algorithm.streams),
            training=self.training,
            evaluation=self.evaluation,
            checkpoint=self.checkpoint,
            max_failed_share=self.rollout.max_failed_share,
            replacement_queries=self.rollout.replacement_queries,
            sft_batches={name: agent.sft.batches for name, agent in self.agents.items()},
        )

    def engine(self, agent: str) -> EngineConfig:
        """What the agent's instances are told."""
        engine = self.agents[agent].engine
        return engine.model_copy(update={"max_batch": 1}) if self.deterministic else engine

    def recipe_config(self) -> RecipeConfig:
        return RecipeConfig(folder=self.recipe, data=self.data, seed=self.seed)


# --------------------------------------------------------------------------- resolving


def resolve(recipe: str, overrides: Sequence[str]) -> RunConfig:
    """The config of a built-in recipe (by name) or of a recipe folder, with dotted overrides applied.

    Raises ConfigError for a recipe that is not there, a file that is no YAML mapping, and whatever the schema refuses.
    """
    folder = recipe_folder(recipe)
    raw = read_yaml(folder / "config.yaml")
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
    if isinstance(agents := raw.get("agents"), dict):
        raw["agents"] = {name: _merged(defaults, agent or {}) for name, agent in agents.items()}
    return check(_with_absolute_paths(raw, folder), str(folder / "config.yaml"))


def check(raw: dict[str, Any], source: str) -> RunConfig:
    """The typed config. Raises ConfigError listing every problem, each with its key and value."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        problems = "\n".join(f"  {_problem(item)}" for item in error.errors(include_url=False))
        raise ConfigError(f"{source}, overrides included:\n{problems}") from None


def recipe_folder(recipe: str) -> Path:
    built_in = RECIPES / recipe.replace("-", "_")
    folder = built_in if _RECIPE_NAME.fullmatch(recipe) and built_in.is_dir() else Path(recipe)
    for file in ("config.yaml", "workflow.py"):
        if not (folder / file).is_file():
            known = ", ".join(sorted(p.parent.name.replace("_", "-") for p in RECIPES.glob("*/config.yaml")))
            raise ConfigError(f"no recipe {recipe!r}: neither built in ({known}) nor a folder with a {file}")
    return folder.resolve()


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises ConfigError where the file can't be read or holds no mapping."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no mapping of keys to values")
    return raw


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """``a.b.c=value`` with the value read as YAML, so that ``true``, ``[1, 2]`` and ``null`` mean what they say."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r}: write key.key=value, for example training.micro_batch=8")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is no YAML: {error}") from None
    *parents, last = key.split(".")
    _refuse_unknown_agent(raw, [*parents, last], override)
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


def _refuse_unknown_agent(raw: dict[str, Any], keys: Sequence[str], override: str) -> None:
    """Agents have defaults, so a misspelt name would be a further agent."""
    agents = raw.get("agents")
    if keys[0] == "agents" and len(keys) > 1 and isinstance(agents, dict) and keys[1] not in agents:
        raise ConfigError(
            f"override {override!r}: there is no agent {keys[1]!r}; there are: {', '.join(map(str, agents))}"
        )


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}


def _with_absolute_paths(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Model and tokenizer paths are relative to the recipe's folder, or else to the working directory.

    What is neither there nor written as a path is a hub's name. Raises ConfigError where a path leads nowhere.
    """
    agents = raw.get("agents")
    for name, agent in agents.items() if isinstance(agents, dict) else ():
        model = agent.get("model") if isinstance(agent, dict) else None
        if not isinstance(model, dict):
            continue  # the schema will say what is wrong with it
        for key in ("path", "tokenizer"):
            if not isinstance(written := model.get(key), str):
                continue
            places = [folder / written, Path(written).expanduser()]
            if found := next((place for place in places if place.exists()), None):
                model[key] = str(found.resolve())
            elif written.startswith(("/", "./", "../", "~")):
                raise ConfigError(f"agents.{name}.model.{key}={written!r}: there is no such file or folder")
    return raw


def _problem(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{key}: there is no such key (value {item['input']!r}); {_allowed_keys(item['loc'])}"
    if item["type"] == "missing":
        return f"{key}: is missing"
    message = item["msg"].removeprefix("Value error, ")
    if isinstance(item["input"], dict):  # the message names the value; a section is too long to be shown
        return f"{key}: {message}" if key else message
    return f"{key}={item['input']!r}: {message}"


def _allowed_keys(location: Sequence[int | str]) -> str:
    model: Any = RunConfig
    for part in location[:-1]:
        if get_origin(model) is dict:  # agents and columns are by name
            model = get_args(model)[1]
            continue
        annotation = model.model_fields[part].annotation
        sections = [kind for kind in get_args(annotation) if hasattr(kind, "model_fields")]
        model = annotation if get_origin(annotation) is dict or not sections else sections[0]
    return f"allowed: {', '.join(model.model_fields)}"
