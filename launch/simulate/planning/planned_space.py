"""The space of a plan, from its scenario: the numbers that fit the memory, and the times that they have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....actors.inference.engine_bytes import engine_bytes
from ....actors.inference.engine_times import EngineTimes
from ....actors.inference.inference_config import EmbeddedEngineConfig, VllmEngineConfig
from ....actors.model_shape import ModelShape
from ....actors.names import PolicyName
from ....actors.trainer.backends.backend_config import TorchTrainerConfig
from ....actors.trainer.backends.trainer_times import TrainerTimes
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ....actors.trainer.rank_bytes import RankLoad, rank_bytes
from ...config.config_reading import with_overrides
from ...config.config_sections import PolicyConfig
from ...config.run_config import RunConfig
from ...hosts.placement.auto_ranks import with_least_ranks
from ...hosts.placement.model_memory import ITEM_BYTES
from ...hosts.placement.plan import DoesNotFit
from ...hosts.placement.run_placement import cards_of
from ...hosts.placement.training_bytes import CONTEXT_BYTES, Cards, load_of, parts_of
from ..cluster_config import ClusterConfig
from ..cluster_links import StateSizes
from ..engine_sources import times_of_engine
from ..roofline import EngineLoad, TrainerLoad, trainer_times
from ..scenario import Scenario, model_shapes, policy_share
from .candidates import PolicyRoom, Space
from .step_bound import BoundModel, PolicyWork, draw_workload

_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class PlannedSpace:
    """``refusals``: numbers that were left out, each with the memory that it needs."""

    space: Space
    model: BoundModel
    refusals: Sequence[str]


def planned_space(scenario: Scenario) -> PlannedSpace:
    """Raises DoesNotFit if a policy fits the devices with no number, and as ``model_shapes`` does."""
    config = _in_shared_pool(with_least_ranks(scenario.config))
    shapes, cluster = model_shapes(config), scenario.cluster
    samples = config.training.queries_per_step * config.training.trajectories_per_query
    longest = {name: agent.sampling.max_new_tokens for name, agent in config.agents.items()}
    drawn = draw_workload(scenario.workload, samples, longest)
    agents = {name: config.agents_of(name) for name in config.policies}
    work = {
        name: PolicyWork(
            drawn.turns(agents[name]), drawn.mean(agents[name], "prompts"), drawn.mean(agents[name], "tokens"),
            policy.engine.max_batch, policy.train, scenario.workload.agents[agents[name][0]].prompt.computed,
        )
        for name, policy in config.policies.items()
    }  # fmt: skip
    cards = cards_of(cluster.descriptions(), share_gpus=config.hosts.share_gpus)
    assert cards is not None, "a cluster has devices"
    rooms: dict[PolicyName, PolicyRoom] = {}
    engines: dict[tuple[PolicyName, int], EngineTimes] = {}
    installs: dict[tuple[PolicyName, int], float] = {}
    trainers: dict[tuple[PolicyName, int], TrainerTimes] = {}
    publishes: dict[PolicyName, float] = {}
    resumes: dict[tuple[PolicyName, int], float] = {}
    refusals: list[str] = []
    for name, policy in config.policies.items():
        item_bytes, shape, engine = ITEM_BYTES[policy.real_model.dtype], shapes[name], policy.engine
        assert isinstance(engine, VllmEngineConfig | EmbeddedEngineConfig), "others are refused"
        sizes = _fitting(name, "an instance on", _instance_problems(policy, shape, cluster), refusals)
        ranks = _ranks(config, policy, shape, cards, name, refusals) if policy.train else ()
        published = StateSizes.of(shape, item_bytes)
        for size in sizes:
            load = EngineLoad(size, item_bytes, engine.kv_cache_bytes)
            engines[name, size] = times_of_engine(policy.real_model, shape, cluster, load, engine.max_batch)
            installs[name, size] = published.weights / size / cluster.copy_bytes_s(size)
        publishes[name] = published.weights / cluster.copy_bytes_s(1)
        trainer = policy.trainer
        assert isinstance(trainer, TorchTrainerConfig), "engine and trainer are simulated together"
        trained = policy_share(config, name, scenario.workload, "trained")
        for count in ranks:
            training = TrainerLoad(
                count,
                item_bytes,
                trainer.tokens_per_forward,
                trainer.activation_checkpointing,
                trained=trained,
            )
            trainers[name, count] = trainer_times(shape, cluster, training)
            together = -(-count // -(-count // cluster.devices))
            resumes[name, count] = published.rest / count / cluster.copy_bytes_s(together)
        load_s = work[name].turns * work[name].turn_s(engines[name, sizes[0]], work[name].turns) * sizes[0]
        rooms[name] = PolicyRoom(sizes, ranks, load_s, max(1, round(work[name].turns)))
    space = Space(
        cluster.hosts * cluster.devices, rooms, config.training.micro_batch, samples, _balances(config)
    )
    model = BoundModel(config.mode, work, agents, drawn, engines, installs, publishes, resumes, trainers, {})
    return PlannedSpace(space, model, refusals)


def _in_shared_pool(config: RunConfig) -> RunConfig:
    """The same with a pool of slots: a plan has no other, as a static pool is one slot with all policies."""
    if isinstance(config.pool, SharedPoolConfig):
        return config
    return with_overrides(config, ["pool={name: shared, slots: 1}"], "the scenario with a shared pool")


def _balances(config: RunConfig) -> Sequence[str]:
    on = config.balance.scope if config.balance.scope != "off" else "intra"
    return (on, "off") if len(config.policies) == 1 else tuple(dict.fromkeys((on, "intra+inter", "off")))


def _fitting(
    name: PolicyName, purpose: str, problems: Iterator[tuple[int, str]], refusals: list[str]
) -> list[int]:
    """The numbers without a problem; those with one are noted. Raises DoesNotFit without any."""
    fitting: list[int] = []
    reasons: list[str] = []
    for number, problem in problems:
        if problem:
            reasons.append(f"policy {name}: {purpose} {number}: {problem}")
        else:
            fitting.append(number)
    if not fitting:
        raise DoesNotFit(reasons)
    refusals += reasons
    return fitting


def _instance_problems(
    policy: PolicyConfig, shape: ModelShape, cluster: ClusterConfig
) -> Iterator[tuple[int, str]]:
    """Numbers of devices within a host, each with the reason that it does not fit, or an empty one."""
    engine = policy.engine
    assert isinstance(engine, VllmEngineConfig | EmbeddedEngineConfig), "others are refused"
    for devices in _powers(cluster.devices):
        options = engine
        if isinstance(engine, VllmEngineConfig):
            options = engine.model_copy(update={"tensor_parallel": devices})
        elif devices > 1:
            return
        if shape.heads % devices:
            continue
        needed = engine_bytes(shape, options, ITEM_BYTES[policy.real_model.dtype])
        parts = (("weights", needed.weights_bytes), ("keys and values", needed.kv_cache_bytes))
        yield devices, _problem(needed.total_bytes, parts, cluster.device_bytes)


def _ranks(
    config: RunConfig,
    policy: PolicyConfig,
    shape: ModelShape,
    cards: Cards,
    name: PolicyName,
    refusals: list[str],
) -> Sequence[int]:
    """The numbers of ranks that fit; beyond a micro-batch only if no smaller one does."""
    load = load_of(config, policy, shape, cards)
    assert load is not None, "a trained policy has one"
    numbers = _fitting(name, "ranks", _rank_problems(shape, load, cards), refusals)
    useful = [number for number in numbers if number <= config.training.micro_batch]
    return useful or numbers[:1]


def _rank_problems(shape: ModelShape, load: RankLoad, cards: Cards) -> Iterator[tuple[int, str]]:
    for ranks in _powers(cards.count):
        needed = rank_bytes(shape, replace(load, ranks=ranks, replicas=1))
        yield ranks, _problem(needed.peak + CONTEXT_BYTES, parts_of(needed), cards.room_bytes)


def _problem(needed: int, parts: Sequence[tuple[str, int]], room: int) -> str:
    if needed <= room:
        return ""
    listed = ", ".join(f"{part} {size / _GIB:.1f}" for part, size in parts)
    return f"{needed / _GIB:.1f} GiB of a device's {room / _GIB:.1f} GiB ({listed})"


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]
