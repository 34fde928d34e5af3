"""The actors of a run: the class of each, and the setup it is made with. Pure.

The classes are named, not imported: each is imported in its actor's process alone, and some import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ...actors.inference.instance_setup import InstanceSetup
from ...actors.inference.router.router_setup import RouterSetup
from ...actors.messages import (
    ArchiveApi,
    ConsoleApi,
    InstanceApi,
    OrchestratorApi,
    RewardsApi,
    RolloutApi,
    RouterApi,
    SessionsApi,
    SlotApi,
    StoreApi,
    SupervisorApi,
    TrainerApi,
)
from ...actors.names import PolicyName
from ...actors.orchestrator.checkpoint import RunState
from ...actors.orchestrator.evaluation import EvaluationRules
from ...actors.orchestrator.opponents.opponents import FrozenPolicy, OpponentsSetup
from ...actors.orchestrator.orchestrator_setup import OrchestratorPolicy, OrchestratorSetup
from ...actors.rewards.reward_service import RewardServiceSetup
from ...actors.rollout.rollout_setup import RolloutAgent, RolloutPolicy, RolloutSetup
from ...actors.store.store_setup import StoreSetup
from ...actors.trainer.backends.backend_config import has_simulated_gangs
from ...actors.trainer.pool.pool_config import SharedPoolConfig
from ...actors.trainer.trainer_setup import SharedPoolSetup, TrainerSetup
from ...core.ref import ActorRef
from ..config.run_config import RunConfig
from ..hosts import env
from ..run_folder.run_directory import RunDirectory
from .role_setups import orchestrator_plan, policy_setups, rebalance_settings, served_policies

_STORE: Final = "flexmarl.actors.store.store:Store"
_TRAINER: Final = "flexmarl.actors.trainer.trainer:Trainer"
_SLOT: Final = "flexmarl.actors.trainer.pool.slot_worker:SlotWorker"
_INSTANCE: Final = "flexmarl.actors.inference.instance:Instance"
_ROUTER: Final = "flexmarl.actors.inference.router.router_actor:RouterActor"
_ROLLOUT: Final = "flexmarl.actors.rollout.rollout:Rollout"
_REWARDS: Final = "flexmarl.actors.rewards.reward_service:RewardService"
_ORCHESTRATOR: Final = "flexmarl.actors.orchestrator.orchestrator:Orchestrator"
_EMBEDDED_ENGINE: Final = "flexmarl.actors.inference.engines.embedded.embedded_factory"
_TORCH_TRAINER: Final = "flexmarl.actors.trainer.backends.torch_policy.torch_factory"
_SIMULATED_GANG: Final = "flexmarl.actors.trainer.backends.simulated_gang"


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """An actor to be started: ``module:Class``, and the one argument of its constructor. ``restarted``: alone, when it
    is lost; the loss of another actor ends the run. ``env``: variables of its process alone. ``cuda_devices``: the
    UUIDs of the only ones that it sees; None: all of them."""

    actor_class: str
    setup: object
    restarted: bool = False
    env: dict[str, str] = field(default_factory=dict)
    cuda_devices: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class References:
    """References to all actors of a run; ``workers`` are named ``rollout-<number>``; ``instances`` by policy,
    ``<policy>-<number>``, those of several policies by the first of them; ``slots``, of a shared pool,
    ``slot-<number>``; ``rewards``, the reward services, ``rewards-<number>``. ``supervisor``: of the actors that are
    restarted alone. ``archive``: of recorded trajectories; None if they are not recorded. ``gateway``: None if programs
    outside the run open no sessions."""

    store: ActorRef[StoreApi]
    trainer: ActorRef[TrainerApi]
    router: ActorRef[RouterApi]
    workers: list[ActorRef[RolloutApi]]
    orchestrator: ActorRef[OrchestratorApi]
    console: ActorRef[ConsoleApi]
    supervisor: ActorRef[SupervisorApi]
    instances: dict[PolicyName, list[ActorRef[InstanceApi]]]
    slots: list[ActorRef[SlotApi]] = field(default_factory=list)
    archive: ActorRef[ArchiveApi] | None = None
    gateway: ActorRef[SessionsApi] | None = None
    rewards: list[ActorRef[RewardsApi]] = field(default_factory=list)


def actor_specs(
    config: RunConfig,
    directory: RunDirectory,
    references: References,
    resume: tuple[Path, RunState] | None,
    own_gpus: Mapping[str, tuple[str, ...]],
    *,
    continues: bool = False,
) -> dict[str, ActorSpec]:
    """All actors of a run, by name. ``resume``: a committed checkpoint's folder and state. ``own_gpus``: the UUIDs of
    GPUs, for the actors whose processes see these alone. ``continues``: the run had actors before, perhaps without a
    checkpoint."""
    store = replace(store_setup(config, references, directory.store), continues=continues)
    trainer = _trainer_setup(config, references, directory, resume and resume[0])
    router = RouterSetup(
        tuple(config.policies),
        references.console,
        config.router,
        rebalance_settings(config),
        config.followers,
    )
    rollout = rollout_setup(config, references, directory.store, directory.logs)
    orchestrator = _orchestrator_setup(config, references, directory, resume and resume[1])
    specs = {
        references.store.name: ActorSpec(_STORE, store),
        references.trainer.name: ActorSpec(_TRAINER, trainer),
        references.router.name: ActorSpec(_ROUTER, router),
        references.orchestrator.name: ActorSpec(_ORCHESTRATOR, orchestrator),
    }
    specs |= {worker.name: ActorSpec(_ROLLOUT, rollout, restarted=True) for worker in references.workers}
    rewards = RewardServiceSetup(
        config.recipe, config.rewards.processes, config.recipe_config().whole_tracebacks
    )
    specs |= {ref.name: ActorSpec(_REWARDS, rewards, restarted=True) for ref in references.rewards}
    slot = replace(trainer, pool=None)
    specs |= {
        ref.name: ActorSpec(_SLOT, slot, restarted=True, env=dict(env.SLOT_VARIABLES))
        for ref in references.slots
    }
    served = served_policies(config)
    for policy, *beside in config.served_together():
        setup = InstanceSetup(
            policy, served, references.router, config.weights, tuple(beside), config.network.encrypted
        )
        environment = setup.environment()
        specs |= {
            instance.name: ActorSpec(_INSTANCE, setup, restarted=True, env=environment)
            for instance in references.instances[policy]
        }
    return {name: replace(spec, cuda_devices=own_gpus.get(name)) for name, spec in specs.items()}


def modules_of(config: RunConfig) -> tuple[str, ...]:
    """The modules that the actors of a run need, those of large libraries included: to be imported once for all."""
    roles = (_STORE, _TRAINER, _SLOT, _INSTANCE, _ROUTER, _ROLLOUT, _REWARDS, _ORCHESTRATOR)
    modules = [role.partition(":")[0] for role in roles]
    if any(policy.engine.name == "embedded" for policy in config.policies.values()):
        modules.append(_EMBEDDED_ENGINE)
    if not config.simulated:
        modules.append(_TORCH_TRAINER)
    if has_simulated_gangs(policy.trainer for policy in config.policies.values()):
        modules.append(_SIMULATED_GANG)
    return tuple(modules)


def rollout_setup(config: RunConfig, references: References, store_dir: Path, logs: Path) -> RolloutSetup:
    """The setup of each rollout worker of the run; all have the same. ``logs``: the folder for reports of blocked event
    loops."""
    return RolloutSetup(
        recipe=config.recipe_config(),
        agents={
            name: RolloutAgent(
                policy=agent.policy,
                sampling=agent.sampling,
                credit=agent.algorithm,
                columns=agent.columns,
                trained=config.policies[agent.policy].train,
                against=config.against(name),
                explorer=config.explorers.get(agent.policy),
            )
            for name, agent in config.agents.items()
        },
        policies={name: RolloutPolicy(policy.tokenizer) for name, policy in config.policies.items()},
        store=references.store,
        router=references.router,
        orchestrator=references.orchestrator,
        config=config.rollout,
        steps_wait=config.mode != "async",
        store_dir=store_dir,
        logs=logs,
        encrypted=config.network.encrypted,
        archive=references.archive,
        console=references.console,
        gateway=references.gateway,
        serves=config.gateway.serves,
        replays=config.replay.name != "none",
        rewards=config.rewards,
        reward_services=references.rewards,
    )


def store_setup(config: RunConfig, references: References, store_dir: Path) -> StoreSetup:
    """The setup of the run's store."""
    return StoreSetup(
        policies={name: agent.policy for name, agent in config.trained_agents.items()},
        store_dir=store_dir,
        max_staleness=config.staleness,
        order="query" if config.deterministic else "arrival",
        columns=config.columns(),
        limits=config.store.limits(),
        patience_s=config.store.room_timeout_s,
        console=references.console,
    )


def _trainer_setup(
    config: RunConfig,
    references: References,
    directory: RunDirectory,
    resume_from: Path | None,
) -> TrainerSetup:
    pool = None
    if isinstance(config.pool, SharedPoolConfig):
        pool = SharedPoolSetup(
            config=config.pool,
            slots=references.slots,
            supervisor=references.supervisor,
            console=references.console,
            spill_dir=directory.suspended,
        )
    setups = policy_setups(config)
    return TrainerSetup(
        policies={name: setup for name, setup in setups.items() if name in config.trained},
        frozen={name: setup for name, setup in setups.items() if name in config.frozen},
        recipe=config.recipe_config(),
        total_steps=config.training.steps,
        store=references.store,
        store_dir=directory.store,
        resume_from=resume_from,
        pool=pool,
        weights=config.weights,
        encrypted=config.network.encrypted,
        compute_timeout_s=config.training.compute_timeout_s,
        archive=references.archive if config.samples.compared_share else None,
    )


def _orchestrator_setup(
    config: RunConfig, references: References, directory: RunDirectory, resume_from: RunState | None
) -> OrchestratorSetup:
    return OrchestratorSetup(
        plan=orchestrator_plan(config),
        policies={
            name: OrchestratorPolicy(agents=config.agents_of(name), sft_batches=policy.sft.batches)
            for name, policy in config.trained.items()
        },
        opponents=OpponentsSetup(
            {
                name: FrozenPolicy(
                    () if policy.explores else config.agents_of(name),
                    policy.pool_of,
                    config.against(config.agents_of(name)[0]),
                )
                for name, policy in config.frozen.items()
            },
            directory.opponents,
            directory.checkpoints,
            config.seed,
            resume_from.opponents if resume_from else {},
            config.checkpoint.every,
        ),
        trajectories_per_query=config.training.trajectories_per_query,
        max_failed_share=config.rollout.max_failed_share,
        group_order="query" if config.deterministic else "arrival",
        recipe=config.recipe_config(),
        trainer=references.trainer,
        workers=references.workers,
        store=references.store,
        supervisor=references.supervisor,
        router=references.router,
        console=references.console,
        checkpoints=directory.checkpoints,
        checkpoints_kept=config.checkpoint.keep,
        resume_from=resume_from,
        data_timeout_s=config.training.data_timeout_s,
        evaluation=EvaluationRules(config.evaluation.all_samplings(), config.evaluation.success),
        serves=config.gateway.serves,
        replay=config.replay,
        predicts_success=config.rollout.tree is not None and config.rollout.tree.predicts,
    )
