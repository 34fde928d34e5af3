"""A candidate of a plan as settings of its scenario, and as a scenario of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ....actors.inference.inference_config import VllmEngineConfig
from ....actors.names import PolicyName
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ...config.config_reading import apply_override, read_yaml
from ..recorded_workload import RecordedWorkload, set_workload
from ..scenario import Scenario
from .candidates import Candidate


def settings_of(candidate: Candidate, scenario: Scenario) -> list[str]:
    """``KEY=VALUE`` of everything that the candidate decides."""
    config = scenario.config
    shared = isinstance(config.pool, SharedPoolConfig)
    slots = f"pool.slots={candidate.slots}" if shared else f"pool={{name: shared, slots: {candidate.slots}}}"
    settings = [
        *([slots] if candidate.slots else []),
        f"training.micro_batch={candidate.micro_batch}",
        *(
            [f"training.largest_micro_batch={candidate.micro_batch}"]
            if candidate.micro_batch > (config.training.largest_micro_batch or candidate.micro_batch)
            else []
        ),
        f"balance.scope={candidate.balance}",
        # More slots than a host has devices are on several, and so may be a gang.
        *(
            ["hosts.spread=true", "network.bulk=trusted"]
            if candidate.slots > scenario.cluster.devices
            else []
        ),
    ]
    sizes, ranks = dict(candidate.tensor_parallel), dict(candidate.ranks)

    def set_key(name: PolicyName, key: str, value: object) -> None:
        settings.append(f"{scenario.keys.in_text(f'policies.{name}.{key}')}={value}")

    for name, count in candidate.instances:
        policy = config.policies[name]
        set_key(name, "instances", count)
        if isinstance(policy.engine, VllmEngineConfig):
            set_key(name, "engine.tensor_parallel", sizes[name])
        if name in ranks:
            if policy.trainer.min_ranks is not None:
                set_key(name, "trainer.min_ranks", "null")
            if policy.trainer.replicas != 1:
                set_key(name, "trainer.replicas", 1)
            set_key(name, "trainer.ranks", ranks[name])
    return settings


def scenario_yaml(
    file: Path,
    settings: Sequence[str],
    recorded: RecordedWorkload | None,
    remarks: Sequence[str],
) -> str:
    """The scenario ``file`` with these settings in it. ``remarks``: its first lines. ``recorded``: see
    ``read_scenario``."""
    raw: dict[str, Any] = read_yaml(file)
    if recorded is not None:
        set_workload(raw, recorded)
    for setting in settings:
        apply_override(raw, setting)
    comment = "".join(f"# {line}\n" for line in remarks)
    return comment + yaml.safe_dump(raw, sort_keys=False)
