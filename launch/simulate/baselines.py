"""Ways of training several policies on one cluster, as configs of the same actors: those of other systems, the paper's,
and ours without one of its parts.

Each is a row. The scenario's agents, models, batches, engines and devices stay as they are:

    trains        sync: after all rollouts of the step; strict: beside them; async: up to a version behind them
    joins         micro-batches that wait for their policy are computed together, up to the scenario's
                  largest_micro_batch; without, one after the other
    barrier       what the next step waits for: each turn for its own policy, or the step for all
    balance       of turns over instances, and of instances over policies
    pool          shared: policies take turns, several at a time; own: each has slots of its own, in proportion to its
                  parameters; whole: one at a time; co-located: so too, and all devices of the cluster generate
                  before and after
    calls         parallel: as the workload has them; in turn: one call of a trajectory after the other
    shares        gangs have their share of the slots, from the scenario's min_ranks to its ranks; without, a rank for
                  each sample of a micro-batch
    queries       of which trajectories run at once
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from ...actors.config_base import AUTO
from ...actors.errors import ConfigError
from ...actors.inference.router.rebalancer import Scope
from ...actors.names import PolicyName
from ...actors.orchestrator.plan import Barrier, Mode
from ...actors.trainer.pool.pool_config import SharedPoolConfig
from ...core.base.texts import guess
from ...core.errors import FlexmarlError
from ..config.config_reading import check
from ..config.run_config import RunConfig
from .scenario import Scenario, model_shapes, recipe_data, simulated_config

Pool = Literal["shared", "own", "whole", "co-located"]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A row of the table. ``words``: for people. ``queries_at_once``: None for those that the workload has."""

    words: str
    trains: Mode = "strict"
    barrier: Barrier = "policy"
    balance: Scope = "intra+inter"
    pool: Pool = "shared"
    joins: bool = False
    shares: bool = False
    calls_in_turn: bool = False
    queries_at_once: int | None = None


BASELINES: Final[Mapping[str, Baseline]] = MappingProxyType({
    "mas-rl": Baseline(
        "co-located: queries, agents and phases strictly in turn", "sync", "policy", "off", "co-located",
        calls_in_turn=True, queries_at_once=1,
    ),
    "distrl": Baseline(
        "two static pools: synchronous, policies train in turn, agents generate in turn",
        "sync", "policy", "off", "whole", calls_in_turn=True,
    ),
    "marti": Baseline(
        "static devices of each policy: synchronous, agents and policies at once", "sync", "policy", "off", "own"
    ),
    "one-step-off": Baseline("the trainer is a version behind", "async"),
    "flexmarl-paper": Baseline("micro-batches beside the rollouts, a barrier of all versions", barrier="step"),
    "flexmarl": Baseline(
        "micro-batches beside the rollouts, joined if they wait, a barrier a policy", joins=True, shares=True
    ),
    "without-balancing": Baseline("turns are dealt, and no instance moves", balance="off", joins=True, shares=True),
    "without-pipeline": Baseline("training begins after the rollouts", "sync", joins=True, shares=True),
    "without-sharing": Baseline("slots of its own for each policy", pool="own", joins=True),
})  # fmt: skip


def in_mode(scenario: Scenario, name: str) -> Scenario:
    """The scenario in the named way of training. Raises ConfigError for a name that is unknown, or a way that the
    scenario can't have."""
    if (baseline := BASELINES.get(name)) is None:
        names = ", ".join(BASELINES)
        raise ConfigError(
            f"--mode {name}: there is no such mode; there are: {names}{guess(name, [*BASELINES])}"
        )
    try:
        changed = _apply(scenario, baseline)
        simulated_config(changed)
    except FlexmarlError as error:
        raise ConfigError(f"--mode {name} ({baseline.words}): {error}") from error
    return changed


def _apply(scenario: Scenario, baseline: Baseline) -> Scenario:
    workload, cluster, twin_hosts = scenario.workload, scenario.cluster, 0
    if baseline.calls_in_turn:
        workload = workload.model_copy(
            update={"calls": tuple((call,) for stage in workload.calls for call in stage)}
        )
    raw = scenario.config.model_dump(mode="json")
    if baseline.queries_at_once is not None:
        workload = workload.model_copy(update={"queries_at_once": baseline.queries_at_once})
        raw["rollout"]["workers"] = 1  # the limit is of each
    raw["data"] = recipe_data(workload)
    raw["mode"] = baseline.trains
    raw["max_staleness"] = None
    raw["training"]["barrier"] = baseline.barrier
    if not baseline.joins:
        raw["training"]["largest_micro_batch"] = None
    raw["balance"]["scope"] = baseline.balance
    if baseline.pool != "shared":
        _divide(raw, scenario.config, baseline.pool)
    elif not baseline.shares:
        _fix_gangs(raw, scenario.config)
    if baseline.pool in ("whole", "co-located"):
        # One gang for all policies lies on few hosts, and states lie where it is: the memory of those hosts stands for
        # that of all, in which such a system would keep the states of policies that wait.
        cluster = cluster.model_copy(update={"host_memory_gib": cluster.hosts * cluster.host_memory_gib})
    if baseline.pool == "co-located":
        twin_hosts = _spread_instances(raw, scenario)
    config = check(raw, "the baseline")
    return replace(scenario, config=config, workload=workload, cluster=cluster, twin_hosts=twin_hosts)


def _divide(raw: dict[str, Any], config: RunConfig, pool: Pool) -> None:
    """Sets slots and ranks. Raises ConfigError."""
    if not isinstance(config.pool, SharedPoolConfig):
        raise ConfigError(
            "it divides the slots of a pool, and the scenario has pool.name=static: write pool.name=shared"
        )
    slots = config.pool.slot_count
    if pool == "own":
        ranks = _parts_of(slots, config)
    else:  # a rank beyond the samples of a micro-batch would have nothing to compute
        raw["pool"]["slots"] = slots = min(slots, config.training.micro_batch)
        ranks = dict.fromkeys(config.trained, slots)
    for policy, count in ranks.items():
        raw["policies"][policy]["trainer"] |= {"ranks": count, "min_ranks": None, "replicas": 1}


def _fix_gangs(raw: dict[str, Any], config: RunConfig) -> None:
    """Sets ranks where a policy may have fewer than all."""
    for policy, section in config.trained.items():
        trainer = section.trainer
        if trainer.min_ranks is not None and trainer.ranks != AUTO:
            ranks = max(trainer.fewest_ranks, min(trainer.most_ranks, config.training.micro_batch))
            raw["policies"][policy]["trainer"] |= {"ranks": ranks, "min_ranks": None, "replicas": 1}


def _spread_instances(raw: dict[str, Any], scenario: Scenario) -> int:
    """Sets instances for all devices of the cluster. Returns the number of hosts of the slots, which stand for the
    same devices."""
    cluster, policies = scenario.cluster, scenario.config.policies
    generating = sum(policy.engine.devices * policy.instances for policy in policies.values())
    for section in raw["policies"].values():
        section["instances"] *= max(1, cluster.hosts * cluster.devices // generating)
    return -(-int(raw["pool"]["slots"]) // cluster.devices)


def _parts_of(slots: int, config: RunConfig) -> dict[PolicyName, int]:
    """Slots of each trained policy, in proportion to its parameters. Raises ConfigError if there are too few."""
    trained = [*config.trained]
    if len(trained) > slots:
        raise ConfigError(f"{len(trained)} trained policies need a slot each, and pool.slots={slots}")
    shapes = model_shapes(config)
    sizes = {policy: shapes[policy].parameters for policy in trained}
    parts = dict.fromkeys(trained, 1)
    for _ in range(slots - len(trained)):  # each further slot to the policy with the most parameters a slot
        parts[max(trained, key=lambda policy: sizes[policy] / parts[policy])] += 1
    return parts
