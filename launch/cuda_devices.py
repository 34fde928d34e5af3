"""The CUDA devices of a run's instances. Pure.

An instance with ``device: cuda`` computes on devices of its own: they are dealt in the order of the config, from 0.
``device: cuda:1`` puts all instances of the policy on that one. Training and generation may share a device: a machine
with one trains too.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import Final

from ..actors.names import PolicyName
from .config_sections import PolicyConfig
from .run_config import RunConfig

_OF_ITS_OWN: Final = "cuda"


def devices_of_instances(config: RunConfig) -> dict[PolicyName, list[tuple[int, ...]]]:
    """The numbers of the devices of each instance of each policy; empty for an instance without its own."""
    wanted = {name: _wanted(policy) for name, policy in config.policies.items()}
    if (
        config.balance.scope == "intra+inter"
    ):  # an instance has the devices for each policy that it may move to
        most = max(wanted.values())
        wanted = {name: number and most for name, number in wanted.items()}
    free = count()
    return {
        name: [tuple(islice(free, wanted[name])) for _ in range(policy.instances)]
        for name, policy in config.policies.items()
    }


def too_few_devices(config: RunConfig, found: int) -> Iterator[tuple[PolicyName, str]]:
    """The policies whose instances get no device, or too few, of ``found`` ones; each with the reason and a remedy."""
    dealt = devices_of_instances(config)
    needed = sum(len(devices) for instances in dealt.values() for devices in instances)
    for name, instances in dealt.items():
        if any(number >= found for devices in instances for number in devices):
            yield name, _reason(name, config.policies[name], instances, needed, found)


def _reason(
    name: PolicyName, policy: PolicyConfig, instances: list[tuple[int, ...]], needed: int, found: int
) -> str:
    own, each = sum(map(len, instances)), len(instances[0])
    all_policies = f", the instances of all policies need {needed}" if needed > own else ""
    remedy = "take fewer instances"
    if each == 1:
        remedy += f", or device={_OF_ITS_OWN}:0, on which all of them compute together"
    return (
        f"policies.{name}.instances={policy.instances} needs {own} CUDA device{'s' if own > 1 else ''}, {each} for "
        f"each{all_policies}; PyTorch finds {found}: {remedy}"
    )


def _wanted(policy: PolicyConfig) -> int:
    """The number of devices that an instance of the policy needs for itself."""
    model = policy.used_model
    return policy.engine.devices if model is not None and model.device == _OF_ITS_OWN else 0
