"""The path that new weights take to the instances, checked against a run's pool and policies."""

from collections.abc import Mapping

from ...actors.inference.inference_config import VllmEngineConfig
from ...actors.messages import WeightsConfig
from ...actors.names import PolicyName
from ...actors.trainer.pool.pool_config import PoolConfig, SharedPoolConfig
from .config_sections import PolicyConfig


def weights_path_problem(
    weights: WeightsConfig, pool: PoolConfig, policies: Mapping[PolicyName, PolicyConfig]
) -> str | None:
    """The reason for which the policies' weights can't take ``weights.path``; None if they can."""
    if weights.path != "cuda_ipc":
        return None
    if isinstance(pool, SharedPoolConfig):
        return (
            "weights.path=cuda_ipc is for pool.name=static: a shared pool publishes from the host's memory, which "
            "outlives its slot workers: write shm"
        )
    for name, policy in policies.items():
        if not policy.train:
            return (
                f"weights.path=cuda_ipc, and policies.{name}.train=false: a frozen policy is published from the host's "
                "memory: write shm"
            )
        device = "a simulated one" if policy.used_model is None else policy.used_model.device
        if not device.startswith("cuda"):
            return (
                f"weights.path=cuda_ipc wants memory of a device, and policies.{name}.model.device is {device}: write "
                "shm"
            )
        if isinstance(policy.engine, VllmEngineConfig) and policy.engine.tensor_parallel > 1:
            return (
                f"weights.path=cuda_ipc: the {policy.engine.tensor_parallel} workers of "
                f"policies.{name}.engine.tensor_parallel take new weights out of the host's memory: write shm"
            )
    return None
