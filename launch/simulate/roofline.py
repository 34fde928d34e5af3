"""Times of engines and trainers on a device, by rooflines: work divided by the achieved share of a peak. Pure.

With P parameters of ``item_bytes`` (b) each, L layers, H the hidden size, Q the size of a token's queries in a layer,
and T devices of an engine or R ranks of a trainer:

    weights of an engine         b P / T                   bytes, read in each step
    products of a token          2 P / T                   operations; the lookup of an embedding is counted with them
    keys and values of a token   2 L K b / T               bytes, K the size of its keys in a layer
    attention of a pair          4 L Q / T                 operations: a score, and a value by its weight
    sums of a step               2 L                       one after attention, one after the feed-forward; each moves
                                                           2 (T - 1) / T of H b bytes for each token
    forward and backward         6 P, and 12 L Q a pair    operations of a token; 8 and 16 with checkpointed activations
    exchange of a forward        (2 b + 4) P (R - 1) / R   bytes into each rank: weights twice, float32 gradients once
    sum over C replicas          8 P (C - 1) / C           bytes into each host, once for a micro-batch
    optimizer step               28 P / R                  bytes: weights, gradient and two moments in float32 are read,
                                                           all but the gradient written
    checkpoint                   12 P                      bytes, by all hosts of the gang
"""

from dataclasses import dataclass
from typing import Final

from ...actors.inference.engine_times import RooflineTimes
from ...actors.model_shape import ModelShape
from ...actors.trainer.backends.trainer_times import TrainerTimes
from .cluster_config import ClusterConfig
from .devices import DeviceConfig

_GIGA: Final = 1e9
_TERA: Final = 1e12
SPARE_TOKENS: Final = 256.0
"""A product is near its peak from a few hundred rows on: the largest kernels have tiles of 256."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """``item_bytes``: of a weight and of a key. ``kv_bytes``: for keys and values, on each device.
    ``chunk_tokens``, ``prompts_apart``: see ``RooflineTimes``."""

    devices: int
    item_bytes: int
    kv_bytes: int
    chunk_tokens: int = 8192
    prompts_apart: bool = False


@dataclass(frozen=True, slots=True)
class TrainerLoad:
    """``tokens``: of a rank's forward at most. ``checkpoints``: activations are computed a second time. ``replicas``:
    of the policy, with as many of the ``ranks`` each. ``trained``: part of the samples' tokens that are computed."""

    ranks: int
    item_bytes: int
    tokens: int
    checkpoints: bool
    replicas: int = 1
    trained: float = 1.0


def engine_times(shape: ModelShape, device: DeviceConfig, load: EngineLoad) -> RooflineTimes:
    """The times of an engine whose devices are in one host."""
    parts = load.devices
    read_s = 1.0 / (device.memory_gb_s * _GIGA * device.memory_share * parts)
    compute_s = 1.0 / (device.tflops * _TERA * device.product_share * parts)
    key_value_bytes = shape.key_value_bytes(load.item_bytes)
    sums = 2 * shape.layers if parts > 1 else 0
    moved_bytes = sums * 2 * (parts - 1) / parts * shape.hidden * load.item_bytes
    return RooflineTimes(
        step_s=device.step_s + sums * device.exchange_s,
        weights_s=shape.parameters * load.item_bytes * read_s,
        token_s=2 * shape.parameters * compute_s,
        context_token_s=key_value_bytes * read_s,
        pair_s=4 * shape.layers * shape.query_size * compute_s,
        exchange_token_s=moved_bytes / (device.link_gb_s * _GIGA * device.link_share),
        chunk_s=device.prompts_s,
        chunk_tokens=load.chunk_tokens,
        prompts_apart=load.prompts_apart,
        kv_tokens=load.kv_bytes * parts // key_value_bytes,
    )


def trainer_times(shape: ModelShape, cluster: ClusterConfig, load: TrainerLoad) -> TrainerTimes:
    """The times of a policy whose ranks fill hosts one after the other."""
    device, parameters = cluster.device, shape.parameters
    parts = load.ranks // load.replicas
    hosts = -(-parts // cluster.devices)  # of a replica: the first one saves
    # Counted by all tokens, those that are left out included: a forward holds as many more.
    compute_s = load.trained / (device.tflops * _TERA * device.training_share)
    passes = 4 if load.checkpoints else 3
    part = parameters / parts
    gathered = (2 * load.item_bytes + 4) * parameters * (parts - 1) / parts
    return TrainerTimes(
        token_s=2 * passes * parameters * compute_s,
        element_token_s=shape.layers * shape.hidden * device.element_s * load.trained,
        pair_s=4 * passes * shape.layers * shape.query_size * compute_s,
        spare_tokens=SPARE_TOKENS / load.trained,
        forward_s=device.forward_s,
        exchange_s=gathered / _ring_bytes_s(cluster, hosts),
        replica_sum_s=_replica_sum_s(part, cluster, load),
        tokens_per_forward=round(load.tokens / load.trained),
        optimizer_s=device.update_s + 28 * part / (device.memory_gb_s * _GIGA * device.update_share),
        save_s=12 * parameters / (hosts * cluster.disk_gb_s * _GIGA),
    )


def _replica_sum_s(part: float, cluster: ClusterConfig, load: TrainerLoad) -> float:
    """Seconds of a sum of gradients over the replicas, in a ring for each part of ``part`` parameters: both of its
    passes move all but one of as many shares as there are replicas. All rings enter a host by its network."""
    moved = 2 * 4 * part * (load.replicas - 1) / load.replicas
    if load.ranks <= cluster.devices:
        return moved / _ring_bytes_s(cluster, 1)
    return moved * min(load.ranks // load.replicas, cluster.devices) / _ring_bytes_s(cluster, load.replicas)


def _ring_bytes_s(cluster: ClusterConfig, hosts: int) -> float:
    """Bytes that reach each rank a second in a collective of a gang. Over several hosts each byte of a ring enters a
    host once, so that its network is shared by all of its ranks as by one."""
    device = cluster.device
    slowest = device.link_gb_s if hosts == 1 else min(device.link_gb_s, cluster.network_gb_s)
    return slowest * _GIGA * device.link_share
