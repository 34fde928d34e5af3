"""A case: a small run, its hosts and links, and the faults that hit them, all drawn from one seed. Pure.

    draw_case(7)                    the case of seed 7
    draw_case(7).with_faults({1})   the same run and network, with the second of its faults alone

Only what time must not change may differ between a case and the same run without faults: so a case has no setting by
which the first trajectories to end are trained, and no deadline that a fault reaches.

Neighbouring seeds share their run: without faults it is played once for all of them.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ....core.wire.faults import Faults
from ...config.config_reading import resolve_mapping
from ...config.run_config import RunConfig
from ..simulated_faults import ALL_KINDS, FaultKind, FaultPlan, PlannedFault
from ..workload_config import WORKLOAD_RECIPE

_MOST_FAULTS: Final = 10
_SEEDS_OF_A_RUN: Final = 8

_FOCUSED: Final = (
    # Slots are the last role of actors. Workers are, without slots.
    FaultPlan(every_s=0.3, most=_MOST_FAULTS, lasts_s=0.5, kinds={FaultKind.KILL: 1.0}, least_place=0.7),
    FaultPlan(every_s=0.3, most=4, lasts_s=2.0, for_good=0.7, kinds={FaultKind.CUT_NODES: 1.0}),
)
"""Faults that all have to hit one kind of actors or links before they show anything."""


@dataclass(frozen=True, slots=True)
class ChaosCase:
    """``settings``: the keys of a run's config. ``link_faults``: of all messages. ``faults``: in the order of their
    beginnings."""

    seed: int
    settings: Mapping[str, Any]
    hosts: int
    link_faults: Faults
    faults: tuple[PlannedFault, ...]

    def config(self) -> RunConfig:
        """The config of the run."""
        return self._resolve(self.settings)

    def config_without_faults(self) -> RunConfig:
        """The same run with the usual heartbeats: nothing is silent, and they are most of the messages."""
        return self._resolve({key: value for key, value in self.settings.items() if key != "supervision"})

    def _resolve(self, settings: Mapping[str, Any]) -> RunConfig:
        config, _ = resolve_mapping(settings, (), f"the case of seed {self.seed}")
        return config

    def with_faults(self, numbers: Collection[int]) -> "ChaosCase":
        """The case with some of its faults, by their numbers from 0."""
        kept = tuple(fault for number, fault in enumerate(self.faults) if number in numbers)
        return replace(self, faults=kept)


def draw_case(seed: int) -> ChaosCase:
    """The case that a seed decides."""
    draw = random.Random(f"case {seed}")
    faults = _fault_plan(draw).draw(draw.getrandbits(32))
    # Of three hosts two have a link without the head.
    least = 3 if any(fault.kind is FaultKind.CUT_NODES for fault in faults) else 1
    return ChaosCase(
        seed,
        _with_large_pool(_settings(run := seed // _SEEDS_OF_A_RUN), random.Random(f"pool of run {run}")),
        draw.randint(least, 4),
        _link_faults(draw),
        faults,
    )


def _settings(run: int) -> dict[str, Any]:
    """Those of a run, by its number."""
    draw = random.Random(f"run {run}")
    policies = [f"p{number}" for number in range(draw.randint(1, 3))]
    agents = [f"a{number}" for number in range(len(policies) + draw.choice((0, 0, 1)))]
    policy_of = dict(zip(agents, [*policies, draw.choice(policies)], strict=False))
    slots = draw.choice((0, 0, 1, 1, 2, 3))
    return {
        "recipe": str(WORKLOAD_RECIPE),
        "seed": run,
        "data": {"workload": _workload(draw, agents)},
        "policies": {name: _policy(draw, slots) for name in policies},
        "agents": {
            name: {"policy": policy, "sampling": {"max_new_tokens": draw.choice((16, 64))}}
            for name, policy in policy_of.items()
        },
        "rollout": {"workers": draw.randint(1, 3), "turn_retries": 200},
        "balance": {"scope": draw.choice(("off", "intra", "intra+inter")), "threshold": draw.choice((1, 5))},
        "checkpoint": {"every": draw.randint(0, 2), "keep": draw.randint(1, 2)},
        # A worker's share of memory is made of zeros: a usual one takes longer than the whole run.
        "store": {"memory_bytes": draw.choice((1 << 16, 1 << 20))},
        **_mode(draw),
        **_training(draw),
        **_pool(slots),
        # The time of a worker behind a link that stays cut; a usual one is 900 s.
        "router": {"return_timeout_s": 60.0},
        # A silent peer is lost after two of them. Limits that a run of seconds with several faults may reach are high.
        "supervision": {
            "heartbeat_s": draw.choice((0.2, 0.5)),
            "missed_heartbeats": 2,
            "max_restarts": 200,
        },
    }


def _workload(draw: random.Random, agents: Sequence[str]) -> dict[str, Any]:
    """Each agent is called by every trajectory: the stages are one agent after the other, or two at once."""
    calls = [{"agent": name, "chance": 1.0, "times": draw.choice((1, 1, 2))} for name in agents]
    stages = [[call] for call in calls]
    if draw.random() < 0.3:
        # Once each: turns are numbered as they begin, and after the first time decides which branch is faster.
        stages[:2] = [[{**call, "times": 1} for call in calls[:2]]]
    if draw.random() < 0.3:
        stages.append([{"agent": draw.choice(agents), "chance": 0.5, "times": 1}])
    return {
        "agents": {name: {"prompt": {"median": 8, "sigma": 0.5, "longest": 64}} for name in agents},
        "calls": stages,
        "queries_at_once": None,
        "turn_s": 0.0,
        "environment": draw.choice((None, {"median_s": 0.05, "sigma": 1.0})),
        "reward": draw.choice((None, {"median_s": 0.1, "sigma": 1.0})),
    }


def _policy(draw: random.Random, slots: int) -> dict[str, Any]:
    ranks = draw.randint(1, max(1, min(slots, 2)))
    return {
        "instances": draw.randint(1, 3),
        "engine": {
            "name": "simulated",
            "max_batch": draw.choice((1, 4, 8)),
            "median_tokens": draw.choice((4, 12)),
            "sigma": draw.choice((0.3, 1.0)),
            "token_s": 0.01,
            "install_s": draw.choice((0.0, 0.05, 0.3)),
        },
        "trainer": {
            "name": "simulated",
            "ranks": ranks,
            "min_ranks": draw.randint(1, ranks),
            "token_s": 1e-4,
            "micro_batch_s": draw.choice((0.0, 0.02, 0.2)),
            "optimizer_s": draw.choice((0.0, 0.1)),
        },
    }


def _mode(draw: random.Random) -> dict[str, Any]:
    mode = draw.choice(("strict", "strict", "sync", "async"))
    if mode == "async":
        return {"mode": mode, "max_staleness": draw.randint(1, 2)}
    return {"mode": mode, "deterministic": draw.random() < 0.2}


def _training(draw: random.Random) -> dict[str, Any]:
    queries, trajectories = draw.randint(1, 4), draw.randint(2, 3)
    return {
        "training": {
            "steps": draw.randint(2, 4),
            "queries_per_step": queries,
            "trajectories_per_query": trajectories,
            "micro_batch": draw.choice((1, draw.randint(1, min(4, queries * trajectories)))),
        }
    }


def _pool(slots: int) -> dict[str, Any]:
    """``slots``: 0 for a static pool."""
    return {"pool": {"name": "shared", "slots": slots} if slots else {"name": "static"}}


def _with_large_pool(settings: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Half of the shared pools have gangs of up to four ranks, replicas, states beside each other on a slot, and hosts
    with so little memory that states go to the disk."""
    # Drawn apart from all else: the seeds that tests name keep their runs.
    if settings["pool"]["name"] != "shared" or draw.random() < 0.5:
        return settings
    slots = draw.randint(2, 4)
    policies = {
        name: {**policy, "trainer": _large_gang(policy, slots, draw)}
        for name, policy in settings["policies"].items()
    }
    pool = {
        **settings["pool"],
        "slots": slots,
        "states_per_slot": draw.choice((1, 2)),
        "host_memory_gib": draw.choice((None, 1e-8)),
    }
    return {**settings, "policies": policies, "pool": pool}


def _large_gang(policy: Mapping[str, Any], slots: int, draw: random.Random) -> dict[str, Any]:
    ranks = draw.choice((slots, draw.randint(1, slots)))
    # From one rank on, a policy is divided differently the most often.
    fewest = draw.choice((1, draw.randint(1, ranks)))
    replicas = draw.choice([count for count in (1, 2, 2) if ranks % count == 0])
    return {**policy["trainer"], "ranks": ranks, "min_ranks": fewest, "replicas": replicas}


def _link_faults(draw: random.Random) -> Faults:
    slowest_s = draw.choice((0.0002, 0.002, 0.02))
    return Faults(delay_s=(0.0001, slowest_s), duplicate=draw.choice((0.0, 0.01)), late_s=0.3)


def _fault_plan(draw: random.Random) -> FaultPlan:
    """Often of a few kinds alone: so they come together in ways that a mixture of all seldom has. Runs train for some
    seconds, of which a row of faults hits a part: it may begin in the middle."""
    names, weights = [*ALL_KINDS], [*ALL_KINDS.values()]
    count = draw.choice((1, 2, 3, len(names)))
    kinds = dict.fromkeys(names if count == len(names) else draw.choices(names, weights, k=count))
    if (focus := draw.choice((None, None, *_FOCUSED))) is not None:
        return replace(focus, begin_s=draw.uniform(0.0, 3.0))
    return FaultPlan(
        begin_s=draw.choice((0.0, draw.uniform(0.0, 3.0), draw.uniform(0.0, 10.0))),
        every_s=draw.choice((0.1, 0.3, 1.0)),
        most=draw.randint(1, _MOST_FAULTS),
        lasts_s=draw.choice((0.1, 0.5, 2.0)),
        for_good=draw.choice((0.0, 0.1, 0.5)),
        kinds={kind: ALL_KINDS[kind] for kind in kinds},
    )
