"""A scenario: the config of a run, the cluster that it is to run on, and the workload that it has. From a YAML file.

    agents, training, pool ...     train's keys: real engines, trainers and models
    cluster                        hosts and devices (``cluster_config.py``)
    workload                       lengths, calls and times (``workload_config.py``)

The run that is simulated has the same keys but for engines and trainers: these take the times that the real ones would
take on the cluster. A run that does not fit these hosts is refused by the plan of the real one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import ValidationError

from ...actors.config_base import Config
from ...actors.errors import ConfigError
from ...actors.inference.inference_config import EmbeddedEngineConfig, VllmEngineConfig
from ...actors.inference.measured_times import MeasuredTimes
from ...actors.model_shape import ModelShape
from ...actors.names import PolicyName
from ...actors.trainer.backends.backend_config import TorchTrainerConfig
from ...core.base.texts import guess
from ..config.config_reading import (
    apply_override,
    check,
    override_key,
    read_yaml,
    resolve_mapping,
)
from ..config.config_sections import PolicyConfig
from ..config.run_config import RunConfig
from ..config.written_config import WrittenConfig
from ..hosts.placement.auto_ranks import with_chosen_ranks
from ..hosts.placement.model_memory import ITEM_BYTES, shape_of_model, unknown_shape
from ..hosts.placement.plan import Plan
from ..hosts.placement.run_placement import cards_of, place_shapes
from ..hosts.placement.slot_states import states_note
from .cluster_config import ClusterConfig
from .cluster_links import ClusterLinks, StateSizes
from .engine_sources import times_of_engine
from .recorded_workload import RecordedWorkload, set_workload
from .roofline import EngineLoad, TrainerLoad, trainer_times
from .workload_config import WORKLOAD_RECIPE, LengthsConfig, WorkloadConfig

_SECTIONS: Final = {
    "cluster": "such as 'cluster={hosts: 1, devices: 8, device: H100}'",
    "workload": "or --from RUN_DIR, a run that has measured it",
}
_SCENARIOS: Final = Path(__file__).parent / "scenarios"
_NAME: Final = re.compile(r"[a-z0-9_-]+")

Section = TypeVar("Section", bound=Config)


@dataclass(frozen=True, slots=True)
class Scenario:
    """``config``: of the real run. ``keys``: as it is written. ``twin_hosts``: of devices that generate and train in
    turn: each of them is two devices here, of which one at a time computes."""

    config: RunConfig
    keys: WrittenConfig
    cluster: ClusterConfig
    workload: WorkloadConfig
    twin_hosts: int = 0

    @property
    def hosts(self) -> int:
        """Number of simulated hosts."""
        return self.cluster.hosts + self.twin_hosts


def scenario_file(words: str) -> Path:
    """A file by its path, or a built-in scenario by its name. Raises ConfigError."""
    built_in = _SCENARIOS / f"{words.replace('-', '_')}.yaml"
    if _NAME.fullmatch(words) and built_in.is_file():
        return built_in
    if (config := Path(words) / "config.yaml").is_file():
        raise ConfigError(f"{words} is a folder, and a scenario a file: {config} may be one")
    if not Path(words).is_file():
        names = sorted(file.stem.replace("_", "-") for file in _SCENARIOS.glob("*.yaml"))
        raise ConfigError(
            f"no scenario {words!r}: neither built in ({', '.join(names)}) nor a file{guess(words, names)}"
        )
    return Path(words)


def read_scenario(path: Path, overrides: Sequence[str], recorded: RecordedWorkload | None = None) -> Scenario:
    """``overrides``: ``key.key=value``, also of ``cluster`` and ``workload``. ``recorded``: what a run has measured,
    see ``set_workload``. Raises ConfigError."""
    raw = read_yaml(path)
    if recorded is not None:
        set_workload(raw, recorded)
    of_run = []
    for override in overrides:
        if (key := override_key(override)).partition(".")[0] in _SECTIONS:
            if key.startswith("cluster.device."):
                _write_as_base(raw.get("cluster"))
            apply_override(raw, override)
        else:
            of_run.append(override)
    sections = {name: raw.pop(name, None) for name in _SECTIONS}
    cluster = _section(ClusterConfig, "cluster", sections, path)
    workload = _section(WorkloadConfig, "workload", sections, path)
    config, keys = resolve_mapping(
        {**raw, "recipe": str(WORKLOAD_RECIPE), "data": recipe_data(workload)}, of_run, str(path)
    )
    return Scenario(config, keys, cluster, workload)


def _write_as_base(cluster: Any) -> None:
    """Writes a named device as the base of one with numbers of its own, so that an override can change one of them."""
    if isinstance(cluster, dict) and isinstance(device := cluster.get("device"), str):
        cluster["device"] = {"base": device}


def _section(kind: type[Section], name: str, sections: Mapping[str, Any], path: Path) -> Section:
    if sections[name] is None:
        raise ConfigError(f"{path} has no section {name}: a simulation needs it, {_SECTIONS[name]}")
    try:
        return kind.model_validate(sections[name])
    except ValidationError as error:
        problems = [_problem(kind, name, item) for item in error.errors(include_url=False)]
        raise ConfigError(f"{path}, overrides included:\n  " + "\n  ".join(problems)) from None


def _problem(kind: type[Config], name: str, item: Any) -> str:
    """One line for a mistake that pydantic found: the key, and its value or the keys that there are."""
    location, value = item["loc"], item["input"]
    key = ".".join(map(str, (name, *location)))
    if item["type"] == "extra_forbidden":
        allowed = _keys_at(kind, location[:-1])
        return (
            f"{key}: there is no such key (value {value!r}); allowed: {', '.join(allowed)}"
            f"{guess(str(location[-1]), allowed)}"
        )
    if item["type"] == "missing":
        return f"{key}: is missing"
    if item["type"] == "model_type":
        return f"{key}={value!r}: needs a section of keys; there are: {', '.join(_keys_at(kind, location))}"
    message = item["msg"].removeprefix("Value error, ")
    # A section is too long to be shown, and the words of a validator have the value.
    shows = item["type"] != "value_error" and not isinstance(value, dict | list)
    return f"{key}={value!r}: {message}" if shows else f"{key}: {message}"


def _keys_at(kind: type[Config], location: Sequence[str | int]) -> list[str]:
    """Lists the keys of the section at ``location`` in a section of ``kind``."""
    section: Any = kind
    for part in location:
        if (field := section.model_fields.get(part)) is not None:
            section = _config_in(field.annotation) or section
    return [*section.model_fields]


def _config_in(annotation: Any) -> type[Config] | None:
    """Returns the class of a section, or of the sections in a mapping or a list; None for other values."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    inner = map(_config_in, get_args(annotation))
    return next((section for section in inner if section is not None), None)


def recipe_data(workload: WorkloadConfig) -> dict[str, Any]:
    """The arguments of the recipe's functions."""
    data = workload.model_dump(mode="json")
    for name, agent in workload.agents.items():
        data["agents"][name]["prompt"]["longest"] = agent.prompt.most
    return {"workload": data}


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A run that ``simulate`` plays once: its config, and the links of its cluster. ``slot_states``: the plan's
    sentence about the states of a slot."""

    config: RunConfig
    links: ClusterLinks
    slot_states: str = ""


def simulated_config(scenario: Scenario) -> RunConfig:
    """The config of the simulated run. Raises as ``simulated_job``."""
    return simulated_job(scenario).config


def simulated_job(scenario: Scenario) -> SimulatedJob:
    """The simulated run, with the actors where the plan of the real one has them. Raises ConfigError, and DoesNotFit as
    that plan does."""
    if not scenario.config.training.steps:
        raise ConfigError("training.steps=0: a simulation takes the time of steps: write 1 or more")
    hosts = scenario.cluster.descriptions(scenario.twin_hosts)
    shapes = model_shapes(scenario.config)
    config = with_chosen_ranks(scenario.config, lambda: hosts, shapes)
    plan = place_shapes(config, hosts, shapes).plan
    _refuse_shared_devices(plan, scenario.cluster)
    raw = config.model_dump(mode="json")
    for name, policy in config.policies.items():
        lengths = _answer_lengths(config, name, scenario.workload)
        section = raw["policies"][name]
        section["sft"]["batches"] = 0  # examples are the recipe's, and come before the steps
        section["engine"] = {
            **_engine(policy, shapes[name], scenario.cluster, lengths),
            "computed_share": policy_share(config, name, scenario.workload, "prompt.computed"),
        }
        if policy.train:
            section["trainer"] = _trainer(
                policy,
                shapes[name],
                scenario.cluster,
                policy_share(config, name, scenario.workload, "trained"),
            )
    sizes = {
        name: StateSizes.of(shapes[name], _item_bytes(policy)) for name, policy in config.policies.items()
    }
    links = ClusterLinks(scenario.cluster, scenario.hosts, plan, sizes)
    cards = cards_of(hosts, share_gpus=config.hosts.share_gpus)
    note = states_note(config, plan, hosts, shapes, cards)
    return SimulatedJob(check(raw, "the simulated run"), links, note)


def _refuse_shared_devices(plan: Plan, cluster: ClusterConfig) -> None:
    """Raises ConfigError if actors take turns on a device: their times would add up in reality, but not here."""
    demand = sum(len(placed.gpus) for placed in plan.actors.values())
    used = {(placed.node, gpu) for placed in plan.actors.values() for gpu in placed.gpus}
    if demand > len(used):
        raise ConfigError(
            f"instances and training need {demand} devices, and cluster has {cluster.hosts} x {cluster.devices}: they "
            f"would share {demand - len(used)}, which can't be simulated yet: take fewer instances or slots"
        )


def model_shapes(config: RunConfig) -> Mapping[PolicyName, ModelShape]:
    """The shape of each policy's model. Raises ConfigError for a policy that can't be simulated."""
    of_models: dict[
        str, ModelShape | None
    ] = {}  # policies often have the same one, and its outline takes seconds
    shapes: dict[PolicyName, ModelShape] = {}
    for name, policy in config.policies.items():
        key = f"policies.{name}"
        if not isinstance(policy.engine, VllmEngineConfig | EmbeddedEngineConfig):
            raise ConfigError(
                f"{key}.engine.name={policy.engine.name}: engines of a scenario are those of the real run, vllm or "
                "embedded: the simulation gives them the times of the cluster"
            )
        if policy.lora is not None:
            raise ConfigError(f"{key}.lora: adapters can't be simulated yet: leave it out")
        model = policy.real_model.model_dump_json()
        if model not in of_models:
            of_models[model] = shape_of_model(policy.real_model)
        if (shape := of_models[model]) is None:
            raise ConfigError(unknown_shape(config, name))
        if shape.experts > 1:
            raise ConfigError(
                f"{key}.model: a model with experts, {shape.experts} for each token, can't be simulated yet"
            )
        shapes[name] = shape
    return shapes


def _answer_lengths(config: RunConfig, policy: PolicyName, workload: WorkloadConfig) -> LengthsConfig:
    """The lengths of a policy's answers. Raises ConfigError for agents without, or that share it but not these."""
    agents = config.agents_of(policy)
    for agent in agents:
        if agent not in workload.agents:
            raise ConfigError(
                f"workload.agents has no lengths of agent {agent!r}; it has: {', '.join(workload.agents)}"
            )
    first = agents[0]
    lengths = workload.agents[first].answer
    for agent in agents[1:]:
        if workload.agents[agent].answer != lengths:
            raise ConfigError(
                f"workload.agents.{first}.answer and workload.agents.{agent}.answer differ, but both use policy "
                f"{policy!r}, whose answers have one distribution of lengths"
            )
    return lengths


def policy_share(config: RunConfig, policy: PolicyName, workload: WorkloadConfig, key: str) -> float:
    """The number ``key`` of a policy's agents in ``workload``. Raises ConfigError for agents whose numbers differ."""
    first, *agents = config.agents_of(policy)
    read = attrgetter(key)
    share = float(read(workload.agents[first]))
    for agent in agents:
        if (other := read(workload.agents[agent])) != share:
            raise ConfigError(
                f"workload.agents.{first}.{key} is {share:g} and that of {agent} {other:g}, but both use policy "
                f"{policy!r}, of whose tokens one part is computed: give both agents the same"
            )
    return share


def _item_bytes(policy: PolicyConfig) -> int:
    return ITEM_BYTES[policy.real_model.dtype]


def _engine(
    policy: PolicyConfig, shape: ModelShape, cluster: ClusterConfig, lengths: LengthsConfig
) -> dict[str, Any]:
    engine = policy.engine
    assert isinstance(engine, VllmEngineConfig | EmbeddedEngineConfig), "others are refused"
    load = EngineLoad(engine.devices, _item_bytes(policy), engine.kv_cache_bytes)
    if isinstance(engine, EmbeddedEngineConfig):
        load = replace(load, chunk_tokens=engine.prefill_chunk, prompts_apart=True)
    times = times_of_engine(policy.real_model, shape, cluster, load, engine.max_batch)
    return {
        "name": "simulated",
        "max_batch": engine.max_batch,
        "max_context": engine.max_context or shape.context or None,
        "median_tokens": lengths.median,
        "sigma": lengths.sigma,
        "measured_times" if isinstance(times, MeasuredTimes) else "times": times.model_dump(mode="json"),
    }


def _trainer(
    policy: PolicyConfig, shape: ModelShape, cluster: ClusterConfig, trained: float
) -> dict[str, Any]:
    trainer = policy.trainer
    assert isinstance(trainer, TorchTrainerConfig), "engine and trainer are simulated together"
    sizes = range(trainer.fewest_ranks, trainer.most_ranks + 1)
    item_bytes, tokens = _item_bytes(policy), trainer.tokens_per_forward
    loads = (
        TrainerLoad(
            ranks, item_bytes, tokens, trainer.activation_checkpointing, trainer.replicas_of(ranks), trained
        )
        for ranks in sizes
    )
    return {
        "name": "simulated",
        "ranks": trainer.most_ranks,
        "min_ranks": trainer.min_ranks,
        "replicas": trainer.replicas,
        "times": [trainer_times(shape, cluster, load).model_dump(mode="json") for load in loads],
    }
