"""The parts of a run's configuration that the roles get: policies as trainer and instances have them, the router's
loads, the orchestrator's plan. Pure."""

from ...actors.inference.inference_config import EngineConfig
from ...actors.inference.instance_setup import ServedBase, ServedPolicy
from ...actors.inference.router.router_loads import RebalanceSettings
from ...actors.messages import ModelConfig
from ...actors.names import PolicyName, Step
from ...actors.orchestrator.plan import Plan
from ...actors.trainer.pool.pool_config import SharedPoolConfig
from ...actors.trainer.trainer_setup import PolicySetup
from ..config.run_config import RunConfig


def policy_setups(config: RunConfig) -> dict[PolicyName, PolicySetup]:
    """The trainer's part of each policy, the frozen ones included."""
    return {name: _policy_setup(config, name) for name in config.policies}


def _policy_setup(config: RunConfig, name: PolicyName) -> PolicySetup:
    policy, agents = config.policies[name], config.agents_of(name)
    longest = max(config.agents[agent].sampling.max_new_tokens for agent in agents)
    return PolicySetup(
        model=policy.used_model,
        lora=policy.lora,
        publishes_adapter=policy.served_as_adapter,
        trainer=policy.trainer,
        credit={agent: config.agents[agent].algorithm for agent in agents},
        optimizer=policy.optimizer,
        loss=policy.algorithm.with_constant_length(longest),
        sft=policy.sft,
        max_staleness=config.staleness,
        updates=config.training.updates,
        init_from=policy.init_from,
        probe_every=config.weights.probe_every if policy.engine.proves_weights else 0,
        compared_share=config.samples.compared_share,
    )


def orchestrator_plan(config: RunConfig) -> Plan:
    """The plan of the whole run; a resumed run begins later."""
    return Plan(
        mode=config.mode,
        policies=tuple(config.trained),
        first_step=Step(1),
        last_step=Step(config.training.steps),
        queries=config.training.queries_per_step,
        micro_batch=config.training.micro_batch,
        largest_micro_batch=config.training.largest_micro_batch or 0,
        most_under_way=_most_under_way(config),
        barrier=config.training.barrier,
        save_every=config.checkpoint.every,
        evaluate_every=config.evaluation.every,
        max_staleness=config.staleness,
        global_batch={
            name: policy.global_batch
            for name, policy in config.policies.items()
            if policy.global_batch is not None
        },
        whole_step=tuple(name for name, policy in config.trained.items() if not policy.algorithm.streams),
        replacement_queries=config.rollout.replacement_queries,
        extra_queries=config.rollout.extra_queries,
    )


def _most_under_way(config: RunConfig) -> int:
    """Computations of a policy that are under way at most, if micro-batches that wait are joined."""
    pool = config.pool
    fewest = sum(policy.trainer.fewest_ranks for policy in config.trained.values())
    if isinstance(pool, SharedPoolConfig) and fewest <= pool.slot_count:
        # No policy waits for the slots of another, and none loses its own between two computations. So all rows that
        # come while one runs are the next: each computation takes as long as its longest sample, however few it has.
        return 1
    # Policies that take turns: the pool takes the slots of one without work, and prefers those with the most.
    return 3


def served_policies(config: RunConfig) -> dict[PolicyName, ServedPolicy]:
    """The instances' part of each policy."""
    return {
        name: ServedPolicy(
            _served_model(config, name),
            _engine(config, policy.engine),
            _served_base(config, name),
            drops_routes=not policy.replays_routes,
        )
        for name, policy in config.policies.items()
    }


def _served_model(config: RunConfig, name: PolicyName) -> ModelConfig | None:
    """A frozen policy has the engine of a trained one that an instance serves beside it, or may move to and from. It
    records the experts of both: with another one the instance would be built again for each load."""
    names = next(names for names in config.served_together() if name in names)
    policy = config.policies[name]
    near = [config.policies[beside] for beside in names]
    if config.balance.scope == "intra+inter":
        near += [
            other
            for other in config.policies.values()
            if (other.model, other.engine) == (policy.model, policy.engine)
        ]
    return policy.used_model if any(other.train for other in near) else policy.served_model


def _served_base(config: RunConfig, name: PolicyName) -> ServedBase | None:
    """The base of a policy that is served as an adapter, with room for all policies that share it."""
    policy = config.policies[name]
    if not policy.served_as_adapter:
        return None
    names = next(names for names in config.served_together() if name in names)
    adapters = [lora for beside in names if (lora := config.policies[beside].lora) is not None]
    seed = policy.real_model.weights_seed(config.seed)
    return ServedBase(seed, max(lora.rank for lora in adapters), len(names))


def rebalance_settings(config: RunConfig) -> RebalanceSettings:
    """The router's part. Turns that are resumed are computed in other parts, which round otherwise: not if the run is
    ``deterministic``."""
    engines = {name: _engine(config, policy.engine) for name, policy in config.policies.items()}
    return RebalanceSettings(
        config.balance,
        capacities={name: engine.turns_at_once for name, engine in engines.items()},
        interruptible=tuple(
            name for name, engine in engines.items() if engine.resumable and not config.deterministic
        ),
    )


def _engine(config: RunConfig, engine: EngineConfig) -> EngineConfig:
    return engine.reproducible() if config.deterministic else engine
