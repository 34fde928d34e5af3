"""Remarks on a configuration that is valid, for the person who starts the run."""

from ...actors.trainer.objective.transforms import sync_warning
from ...actors.trainer.pool.pool_config import SharedPoolConfig
from .run_config import RunConfig


def warnings_about(config: RunConfig) -> list[str]:
    """One line each; none of them stops a run."""
    warnings = []
    if config.deterministic and any(policy.engine.max_batch > 1 for policy in config.policies.values()):
        warnings.append(
            "deterministic: engines generate one turn at a time and keep nothing of it for later prompts: "
            "turns that are computed together round together"
        )
    for name, policy in config.policies.items():
        if policy.trainer.min_ranks is not None and not isinstance(config.pool, SharedPoolConfig):
            warnings.append(
                f"policy {name}: trainer.min_ranks={policy.trainer.min_ranks} has no effect with pool.name="
                f"{config.pool.name}, where a policy always has one rank: leave it out, or write "
                "pool={name: shared, slots: N}"
            )
        model = policy.used_model
        if model is not None and model.device != "cpu" and model.dtype == "float32":
            warnings.append(
                f"policy {name}: model.dtype=float32 on a GPU is several times slower than bfloat16, with twice the "
                "memory for activations and for the engine"
            )
        reason = policy.algorithm.whole_batch_reason
        if reason is not None and config.mode != "sync":
            warnings.append(sync_warning(name, policy.algorithm.name, reason))
        if config.mode == "async" and not policy.engine.resumable:
            warnings.append(
                f"policy {name}: the engine {policy.engine.name} can't resume turns: those that new weights "
                "interrupt begin again"
            )
        if config.mode == "async" and policy.train and policy.algorithm.correction == "none":
            warnings.append(
                f"policy {name}: samples that are older than the policy are trained as if they were not; its "
                "algorithm.correction=decoupled accounts for that (AReaL, arXiv 2505.24298)"
            )
    return warnings
