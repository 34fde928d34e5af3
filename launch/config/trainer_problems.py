"""Checks of trainers, and of the ways of their weights. Rows of the table in ``problems.py``."""

from typing import TYPE_CHECKING

from ...actors.config_base import AUTO
from ...actors.inference.inference_config import VllmEngineConfig
from ...actors.trainer.pool.pool_config import SharedPoolConfig

if TYPE_CHECKING:
    from .run_config import RunConfig


def simulation_problem(config: "RunConfig") -> str | None:
    """Refuses simulated trainers beside real ones."""
    if len({policy.simulated for policy in config.policies.values() if not policy.engine.endpoint}) > 1:
        return "some policies have trainer.name=simulated and others have not: one trainer trains all of them"
    return None


def gang_problem(config: "RunConfig") -> str | None:
    """Refuses more ranks than slots, and several ranks, also as the fewest of ``auto``, without slots."""
    for name, policy in config.policies.items():
        ranks, fewest = policy.trainer.ranks, policy.trainer.min_ranks
        if (
            ranks == AUTO
            and fewest is not None
            and fewest > 1
            and not isinstance(config.pool, SharedPoolConfig)
        ):
            return (
                f"policies.{name}.trainer.min_ranks={fewest} wants slot workers: write pool={{name: shared, slots: "
                f"{AUTO}}}, or leave it out: without a pool a policy has one rank"
            )
        if ranks == AUTO:
            continue  # the plan stays within the slots
        if isinstance(config.pool, SharedPoolConfig):
            if config.pool.slots != AUTO and ranks > config.pool.slots:
                return (
                    f"policies.{name}.trainer.ranks={ranks} is more than pool.slots={config.pool.slots}: all ranks "
                    "of a policy compute at the same time, each on a slot of its own"
                )
        elif ranks > 1:
            return (
                f"policies.{name}.trainer.ranks={ranks} wants slot workers: write pool={{name: shared, slots: "
                f"{ranks}}}, or more slots"
            )
    return None


def network_problem(config: "RunConfig") -> str | None:
    """Refuses weights over TCP in a run that listens on no network."""
    if config.weights.path == "tcp" and config.network.listen is None:
        return (
            "weights.path=tcp: the run listens on no network: write network.listen=ADDRESS or "
            "network.listen=auto, or leave the path out"
        )
    return None


def weights_path_problem(config: "RunConfig") -> str | None:
    """Refuses CUDA IPC where weights do not lie in memory of a CUDA device."""
    if config.weights.path != "cuda_ipc":
        return None
    if isinstance(config.pool, SharedPoolConfig):
        return (
            "weights.path=cuda_ipc is for pool.name=static: a shared pool publishes from the host's memory, which "
            "outlives its slot workers: write shm"
        )
    for name, policy in config.policies.items():
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
