"""Checks of a run's mode against the settings that it rules out. Rows of the table in ``problems.py``."""

from typing import TYPE_CHECKING

from ...actors.orchestrator.replay.replay_config import NoReplayConfig
from .name_problems import NAME

if TYPE_CHECKING:
    from .run_config import RunConfig


def staleness_problem(config: "RunConfig") -> str | None:
    """Refuses a bound of staleness in a mode without stale samples."""
    if config.mode != "async" and config.max_staleness is not None:
        return (
            f"max_staleness={config.max_staleness} is for mode=async; in mode={config.mode} every sample is trained by "
            "the version that generated it"
        )
    return None


def extra_queries_problem(config: "RunConfig") -> str | None:
    """Refuses queries beyond those of a step if the next step can't have them, or too many of them."""
    extra, queries = config.rollout.extra_queries, config.training.queries_per_step
    if not extra:
        return None
    key = f"rollout.extra_queries={extra}"
    if config.mode != "async":
        return (
            f"{key} is for mode=async: queries that a step leaves open would be trained by the next version, and "
            f"mode={config.mode} trains each sample by the version that generated it"
        )
    if extra >= queries:
        return (
            f"{key} must be less than training.queries_per_step={queries}: a step begins a query of its own"
        )
    if config.rollout.replacement_queries:
        return (
            f"{key} can't be used with rollout.replacement_queries={config.rollout.replacement_queries}: a step that "
            "has closed draws no query in place of one that it has passed on; leave one of them out"
        )
    carries = any(policy.global_batch is not None for policy in config.policies.values())
    if config.staleness <= carries:
        return (
            f"{key} with global_batch needs max_staleness=2: samples may be passed on twice, as part of a query and "
            f"as rows beyond the batch, and max_staleness is {config.staleness}"
        )
    return None


def replay_problem(config: "RunConfig") -> str | None:
    """Refuses a replay where samples may not be stale, are not weighed, or can't come again."""
    if isinstance(config.replay, NoReplayConfig):
        return None
    key = f"replay.name={config.replay.name}"
    if config.mode != "async":
        return f"{key} is for mode=async: mode={config.mode} trains each sample by the version that generated it, once"
    bound = config.replay.max_staleness
    if bound is not None and bound > config.staleness:
        return f"replay.max_staleness={bound} is more than the run's own max_staleness={config.staleness}"
    for name, policy in config.trained.items():
        if policy.algorithm.correction == "none":
            return (
                f"{key}: policies.{name}.algorithm.correction=none gives old samples no weight of their version: write "
                "decoupled, tis or icepop"
            )
    for agent, settings in config.trained_agents.items():
        if settings.algorithm.used_rewards in ("turn", "both"):
            return (
                f"{key}: agents.{agent}.algorithm.rewards={settings.algorithm.used_rewards} rewards turns, and a "
                "trajectory that comes again has its agents' rewards alone: write trajectory"
            )
        if settings.sampling.defaults.truncation is not None:
            return (
                f"{key}: agents.{agent}.sampling has top_k, top_p or min_p, and a trajectory that comes again has "
                "log-probabilities of whole distributions: leave them out"
            )
        if any(column.awaited for column in settings.columns.values()):
            return f"{key}: agents.{agent}.columns are written from outside, which happens once: leave one of both out"
    return None


def barrier_problem(config: "RunConfig") -> str | None:
    """Refuses a barrier of the step in a mode that has it anyway, or none."""
    if config.mode != "strict" and config.training.barrier == "step":
        return f"training.barrier=step is for mode=strict, and mode={config.mode}: leave it out"
    return None


def carried_samples_problem(config: "RunConfig") -> str | None:
    """Refuses a batch that carries samples over to the next step in a mode without stale samples."""
    for name, policy in config.policies.items():
        if config.mode != "async" and policy.global_batch is not None:
            return (
                f"policies.{name}.global_batch={policy.global_batch} is for mode=async: samples of a step beyond "
                f"it are carried to the next step and are stale there, which mode={config.mode} rules out. Without "
                "it the policy's batch is all samples of a step's queries"
            )
    return None


def sharing_problem(config: "RunConfig") -> str | None:
    """Refuses groups of other runs where samples may not be stale, or are weighed by a policy that is not known."""
    peers = config.sharing.peers
    if not peers:
        return None
    if config.mode != "async":
        return (
            f"sharing.peers is for mode=async: mode={config.mode} trains what its own version has generated, and the "
            "groups of other runs are of none"
        )
    if config.deterministic:
        return (
            "sharing.peers and deterministic=true: the time at which groups come would decide what is trained"
        )
    for name in peers:
        if not NAME.fullmatch(name):
            return f"sharing.peers.{name}: lower-case letters, digits and _, at most 32, a letter first"
    for name, policy in config.trained.items():
        if policy.algorithm.old_policy == "behaviour" or policy.algorithm.penalises_rewards:
            which = (
                "old_policy=behaviour" if policy.algorithm.old_policy == "behaviour" else "kl_in_reward=true"
            )
            return (
                f"sharing.peers and policies.{name}.algorithm.{which}, which compares with log-probs of the policy "
                "that has generated an answer: other runs share text alone"
            )
    return None


def timing_problem(config: "RunConfig") -> str | None:
    """A setting with which time decides what is trained, in a deterministic run."""
    if not config.deterministic:
        return None
    if config.mode == "async":
        return "deterministic=true is for strict and sync: under async, time decides which version generates"
    if config.rollout.extra_trajectories:
        return (
            f"rollout.extra_trajectories={config.rollout.extra_trajectories} takes the trajectories that end first, "
            "which deterministic=true rules out"
        )
    if config.training.largest_micro_batch is not None:
        return (
            f"training.largest_micro_batch={config.training.largest_micro_batch}: the time at which samples come "
            "decides which are computed together, which deterministic=true rules out"
        )
    for name, agent in config.agents.items():
        if late := [column for column, declared in agent.columns.items() if declared.awaited]:
            return (
                f"agents.{name}.columns.{late[0]} is required and written_by external: the time at which it is "
                "written decides which samples are trained together, which deterministic=true rules out"
            )
    return None


def draws_problem(config: "RunConfig") -> str | None:
    """Refuses an engine in a deterministic run whose draws do not follow from the seed."""
    for name, policy in config.policies.items():
        if config.deterministic and not policy.engine.exact_draws:
            return (
                f"policies.{name}.engine.name={policy.engine.name} draws other tokens for the same seed, which "
                "deterministic=true rules out: take the engine embedded"
            )
    return None
