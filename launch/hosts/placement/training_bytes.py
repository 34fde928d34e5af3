"""The memory of a policy in training: its ranks on their devices, and its states in the host's memory. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ....actors.inference.inference_config import VllmEngineConfig
from ....actors.model_shape import ModelShape
from ....actors.names import PolicyName
from ....actors.trainer.backends.backend_config import TorchTrainerConfig
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ....actors.trainer.rank_bytes import RankBytes, RankLoad, logits_limit, rank_bytes, wants_compilation
from ...config.config_sections import PolicyConfig
from ...config.run_config import RunConfig
from .model_memory import ITEM_BYTES

CONTEXT_BYTES: Final = 2**30
"""CUDA's context, the libraries' workspaces and the allocator's gaps: an estimate."""


@dataclass(frozen=True, slots=True)
class Cards:
    """The GPUs that a run may use. ``room_bytes``: of the largest, beside the memory that others have; ``total_bytes``:
    all of its memory, by which the trainer measures its logits. ``can_compile``: on all of them. ``on_head``: of
    ``count``, those of the head."""

    room_bytes: int
    total_bytes: int
    count: int = 1
    can_compile: bool = True
    on_head: int = 1


def load_of(
    config: RunConfig, policy: PolicyConfig, shape: ModelShape, cards: Cards | None
) -> RankLoad | None:
    """None for a policy without a trainer of torch. ``cards``: None if it computes on CPUs."""
    trainer, loss = policy.trainer, policy.algorithm
    if not isinstance(trainer, TorchTrainerConfig) or not policy.train:
        return None
    in_shared_pool = isinstance(config.pool, SharedPoolConfig)
    published = not in_shared_pool and config.weights.path in ("auto", "cuda_ipc")
    samplings = [config.agents[agent].sampling for agent in config.agents_of(_name_of(config, policy))]
    return RankLoad(
        ranks=trainer.most_ranks,
        tokens=trainer.tokens_per_forward,
        item_bytes=ITEM_BYTES[policy.real_model.dtype],
        logits_bytes=logits_limit(None if cards is None else cards.total_bytes),
        has_checkpoints=trainer.activation_checkpointing,
        is_compiled=cards is not None
        and cards.can_compile
        and wants_compilation(
            trainer.compilation, shape.parameters, replays_routes=policy.real_model.router_replay
        ),
        is_truncated=any(sampling.top_p < 1 or sampling.top_k or sampling.min_p for sampling in samplings),
        has_reference=loss.kl_coefficient > 0,
        has_critic=loss.critic is not None,
        has_entropy=loss.entropy_coefficient > 0,
        adapter=None if policy.lora is None else (policy.lora.rank, policy.lora.targets),
        in_shared_pool=in_shared_pool,
        publishes=2 if published and cards is not None else 0,
        publishes_adapter=policy.served_as_adapter,
        replicas=trainer.replicas,
    )


def _name_of(config: RunConfig, policy: PolicyConfig) -> PolicyName:
    return next(name for name, other in config.policies.items() if other is policy)


def parts_of(needed: RankBytes) -> tuple[tuple[str, int], ...]:
    """The parts of a rank's peak, by name, largest moments as they come: publishing counts if that is the peak."""
    parts = [
        ("weights", needed.weights), ("gradients", needed.gradients), ("moments", needed.moments),
        ("frozen", needed.frozen),
    ]  # fmt: skip
    if needed.peak > needed.forward:
        parts.append(("publishing and loading", needed.peak - needed.state))
    else:
        parts += [
            ("gathered and copies", needed.gathered), ("activations", needed.activations), ("logits", needed.logits),
        ]  # fmt: skip
    return (*((name, size) for name, size in parts if size), ("context", CONTEXT_BYTES))


@dataclass(frozen=True, slots=True)
class HostStateBytes:
    """Bytes of the host's memory for the state of a policy in a shared pool. ``published``: two versions of its
    weights. ``rest``: all of the base part that they are not: weights, moments, reference and critic. ``step``: the
    gradient of a policy that was suspended in mid-step."""

    published: int
    rest: int
    step: int


def host_state_bytes(shape: ModelShape, load: RankLoad) -> HostStateBytes:
    """Weights in float32 of one rank are the published ones themselves: no second copy of them is in the rest. The rest
    of several is the whole base part, so that it has room also for the newer one of another number of ranks."""
    alone = load.alone()
    state, weights = rank_bytes(shape, alone), rank_bytes(shape, replace(alone, has_critic=False)).weights
    published = (weights // 4 if load.publishes_adapter else shape.parameters) * load.item_bytes
    is_live = load.item_bytes == 4 and load.ranks == 1 and load.adapter is None
    reference = (shape.parameters * load.item_bytes if load.adapter is None else weights) * load.has_reference
    models = weights * int(not is_live) + reference + state.weights - weights
    return HostStateBytes(2 * published, state.moments + models, state.gradients)


def shape_problems(config: RunConfig, shapes: Mapping[PolicyName, ModelShape]) -> Iterator[str]:
    """A line for each setting that the model's shape does not allow, and for GPUs that no policy would use."""
    for name, policy in config.policies.items():
        engine, shape = policy.engine, shapes.get(name)
        if shape is None:
            continue
        # transformers builds such a model, which fails in its first forward.
        if not shape.key_heads or shape.heads % shape.key_heads:
            yield (
                f"policies.{name}.model: {shape.key_heads} key heads do not divide the {shape.heads} attention heads "
                "that share them, and layers can't compute that; correct the model's config"
            )
            continue
        if not isinstance(engine, VllmEngineConfig):
            continue
        yield from _short_memory(name, policy, engine, shape)
        if not _divides(engine.tensor_parallel, shape, engine):
            divisors = [str(n) for n in range(1, shape.heads + 1) if _divides(n, shape, engine)]
            yield (
                f"policies.{name}.engine.tensor_parallel={engine.tensor_parallel} does not divide the model's "
                f"{shape.heads} attention heads, {shape.key_heads} key heads and {shape.intermediate} inner columns: "
                f"take one of {', '.join(divisors)}"
            )
    pool = config.pool
    models = [model for policy in config.trained.values() if (model := policy.used_model) is not None]
    if isinstance(pool, SharedPoolConfig) and any(model.device != "cpu" for model in models):
        ranks = sum(policy.trainer.most_ranks for policy in config.trained.values())
        if pool.slot_count > ranks:
            yield (
                f"pool.slots={pool.slots}: all policies together have {ranks} ranks, so that "
                f"{pool.slot_count - ranks} GPUs would never be used: write pool.slots={ranks}, or more trainer.ranks"
            )


def _short_memory(
    name: PolicyName, policy: PolicyConfig, engine: VllmEngineConfig, shape: ModelShape
) -> Iterator[str]:
    """vLLM refuses to start if one sequence of ``max_context`` tokens does not fit (``check_enough_kv_cache_memory`` in
    vllm/v1/core/kv_cache_utils.py)."""
    tokens = engine.max_context or shape.context
    narrow = str(engine.options.get("kv_cache_dtype", "")).startswith("fp8")
    item_bytes = 1 if narrow else ITEM_BYTES[policy.real_model.dtype]
    heads = -(-shape.key_heads // engine.tensor_parallel)
    needed = 2 * shape.full_layers * heads * shape.head_dim * item_bytes * tokens
    if needed > engine.kv_cache_bytes:
        yield (
            f"policies.{name}.engine.kv_cache_bytes={engine.kv_cache_bytes}: one sequence of {tokens} tokens takes "
            f"{needed} on each device: write as many or more, or a smaller engine.max_context"
        )


def _divides(devices: int, shape: ModelShape, engine: VllmEngineConfig) -> bool:
    """True if vLLM can divide each layer over so many devices. Its attention asserts it: each device has as many whole
    heads, and as many whole key heads or a copy of one that as many other devices have. Its linear layers have equal
    columns (``divide`` in vllm/distributed/utils.py), but experts that are divided as wholes."""
    key_heads = shape.key_heads % devices == 0 or devices % shape.key_heads == 0
    is_whole = shape.experts > 1 and bool(engine.options.get("enable_expert_parallel"))
    return shape.heads % devices == 0 and key_heads and (is_whole or shape.intermediate % devices == 0)
