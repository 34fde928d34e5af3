"""The memory that a rank of a policy takes on its device at most, predicted from the shape of its model. Pure.

With P parameters, N ranks of a replica, T tokens of a forward, hidden size H, and w bytes of a number that is computed
with:

    weights, gradients, moments      4, 4 and 8 bytes a parameter, divided by N: all of them are float32
    activations of a layer           a sum of the tensors that autograd keeps, below; with checkpointing w T H bytes for
                                     each layer, and those of one layer
    logits                           of a chunk of tokens, several times: copies and gradients
    gathered                         with several ranks: all that is outside the layers, its gradient, and about two
                                     layers; with one rank: the copies of weights in bfloat16
    publishing                       the tensors that a version is made of, while it is made: all of them in a static
                                     pool, a range of their rows in a shared one, unless the live ones are published

Measured beside it: see ``tests/actors/trainer/test_rank_bytes.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..model_shape import ModelShape

LEAST_LOGITS_BYTES: Final = 128 << 20
"""Logits (float32) that are in memory at a time on a CPU, and the least on a GPU: beyond it they are computed in
chunks, and again in the backward."""

_LEAST_COMPILED: Final = 100_000_000

RANGE_BYTES: Final = 64 << 20
"""Bytes of weights, of all ranks, that are gathered at a time to be published: enough for the fastest links, and little
beside a layer of a large model."""

_MOST_LOGITS_BYTES: Final = 2 << 30
_LOGITS_SHARE: Final = 64

_MASTER: Final = 4  # bytes of a number in float32: weights, gradients and each of two moments

# Copies of a chunk's logits (float32) in its backward. On a CPU and without compilation they follow from the code, and
# were measured; those of a compiled one, and of a truncation, were measured on an H200.
_LOGITS_COPIES: Final = 4.0
_COMPILED_LOGITS_COPIES: Final = {2: 2.0, 4: 3.0}
_TRUNCATED_LOGITS_COPIES: Final = 13.6

_INDICES_BYTES: Final = 40


def logits_limit(device_bytes: int | None) -> int:
    """Bytes of logits (float32) that are in memory at a time. ``device_bytes``: of a GPU; None: on a CPU.

    A GPU's are 1/64 of its memory, 1.25 GiB of 80 GiB, and at most 2 GiB: 128 MiB are 220 tokens of a vocabulary of
    152 000, too few rows for a GPU's matrix products. About 2000 are enough.
    """
    if device_bytes is None:
        return LEAST_LOGITS_BYTES
    return min(max(device_bytes // _LOGITS_SHARE, LEAST_LOGITS_BYTES), _MOST_LOGITS_BYTES)


def wants_compilation(setting: bool | None, parameters: int, *, replays_routes: bool = False) -> bool:
    """True if a model with that many parameters is to be compiled on a GPU. ``setting``: ``trainer.compilation``.
    ``replays_routes``: see ``ModelConfig.router_replay``; such layers are not compiled."""
    if replays_routes:
        return False
    return parameters >= _LEAST_COMPILED if setting is None else setting


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The part of a policy's settings that decides about the memory of a rank.

    ``ranks``: of all ``replicas``. ``tokens``: of a forward, padding included. ``item_bytes``: of a number that is
    computed with, 2 or 4. ``logits_bytes``: see ``logits_limit``. ``is_compiled``: layers and log-probabilities are.
    ``has_reference``, ``has_critic``: models beside the policy's. ``has_entropy``: the loss has an entropy bonus, whose
    log-probabilities are not compiled. ``adapter``: rank and targets of a LoRA policy.
    ``in_shared_pool``: published weights are made in the host's memory, a range at a time, as those of several ranks
    always are. ``publishes``: the number of versions that lie on the device, 0 if in the host's memory;
    ``publishes_adapter``: they are adapters.
    """

    ranks: int
    tokens: int
    item_bytes: int
    logits_bytes: int
    has_checkpoints: bool = False
    is_compiled: bool = False
    is_truncated: bool = False
    has_reference: bool = False
    has_critic: bool = False
    has_entropy: bool = False
    adapter: tuple[int, Sequence[str] | str] | None = None
    in_shared_pool: bool = False
    publishes: int = 0
    publishes_adapter: bool = False
    replicas: int = 1

    @property
    def parts(self) -> int:
        """The parts that tensors are divided into: the ranks of a replica."""
        return self.ranks // self.replicas

    def alone(self) -> "RankLoad":
        """The same on one rank."""
        return replace(self, ranks=1, replicas=1)


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes on the device of a rank. The first four stay: ``frozen`` is a reference, or the base of an adapter. The
    others come and go; ``gathered`` is what several ranks have whole for a while, or copies in bfloat16; ``publishing``
    includes versions that lie on the device. ``largest``: of the largest tensor, whole, in float32; ``padded``: of its
    part on a rank, with several ranks."""

    weights: int
    gradients: int
    moments: int
    frozen: int
    gathered: int
    activations: int
    logits: int
    publishing: int
    largest: int
    padded: int

    @property
    def state(self) -> int:
        """All that stays."""
        return self.weights + self.gradients + self.moments + self.frozen

    @property
    def build(self) -> int:
        """The most while the models are built. Random weights are drawn tensor by tensor, whole; gradients and moments
        are made after that."""
        return max(self.state, self.frozen + self.weights + self.largest)

    @property
    def resume(self) -> int:
        """The most while a suspended state is loaded. The models take over its memory, but for parts that FSDP2 pads,
        which are copied one after the other."""
        return self.state + self.padded

    @property
    def forward(self) -> int:
        """The most within forward and backward."""
        return self.state + self.gathered + self.activations + self.logits

    @property
    def publish(self) -> int:
        """The most while a version is published."""
        return self.state + self.publishing

    @property
    def peak(self) -> int:
        """The most of all."""
        return max(self.build, self.resume, self.forward, self.publish)


def rank_bytes(shape: ModelShape, load: RankLoad) -> RankBytes:
    """The prediction for each rank of a policy: the largest parts, which need not be those of one rank."""
    trained = _trained_parameters(shape, load)
    part = -(-trained // load.parts)
    largest = shape.largest_tensor if load.adapter is None else shape.hidden * load.adapter[0]
    logits = _logits_bytes(shape, load)
    kept = _kept_bytes(shape, load)
    gathered = _gathered_bytes(shape, load)
    # Three moments: the output layer's backward, the last layer's, and the end with all gradients outside the layers.
    at_head = kept + gathered.head + logits
    at_layer = gathered.layer
    if load.has_checkpoints:
        at_layer += _layer_backward_bytes(shape, load)
    elif shape.routed:  # more than the logits of a chunk
        at_layer += kept + load.tokens * _layer_gradient_bytes(shape, load)
    at_end = gathered.end
    most = max(at_head, at_layer, at_end)
    activations = max(kept, most - gathered.head - logits) if most == at_layer else kept
    return RankBytes(
        weights=part * _MASTER,
        gradients=part * _MASTER,
        moments=part * 2 * _MASTER,
        frozen=_frozen_bytes(shape, load),
        gathered=max(gathered.head, most - activations - logits),
        activations=activations,
        logits=logits,
        publishing=_publishing_bytes(shape, load),
        largest=largest * _MASTER,
        padded=-(-largest // load.parts) * _MASTER * (load.ranks > 1),
    )


def _trained_parameters(shape: ModelShape, load: RankLoad) -> int:
    if load.adapter is not None:
        return shape.adapter_parameters(*load.adapter) * (1 + load.has_critic)
    body = shape.parameters - shape.vocabulary * shape.hidden
    return shape.parameters + (body + shape.hidden) * load.has_critic


def _frozen_bytes(shape: ModelShape, load: RankLoad) -> int:
    if load.adapter is not None:
        reference = shape.adapter_parameters(*load.adapter) * load.has_reference
        return -(-shape.parameters // load.parts) * load.item_bytes + -(-reference // load.parts) * _MASTER
    return -(-shape.parameters // load.parts) * load.item_bytes * load.has_reference


# ----------------------------------------------------------------------- activations


def layer_token_bytes(shape: ModelShape, load: RankLoad) -> int:
    """Bytes that autograd keeps of a layer for each token: see ``RankLoad`` for the settings.

    Kept are the inputs of both norms and their scales; the inputs of the products with weights; queries, keys, values,
    their result and its normaliser; gate, its activation, and the other factor. A compiled layer computes what lies
    between two products again. Routed experts compute rows of their own: each token's, once for each of its experts,
    their results before they are weighted and summed, and five indices (int64); the router's probabilities are float32.
    A norm that is not computed in one pass keeps two tensors in float32; a compiled one behind a product its input.
    Values that come out of one product with queries and keys keep the memory of all three, beside the queries and keys
    that were rotated. If only a part of each head is rotated, the parts are joined head by head, so that attention's
    result is copied for the product behind it.
    """
    w = load.item_bytes
    attention = w * (2 * shape.query_size + 2 * shape.key_size) + 4 * shape.heads
    if shape.joins_queries:
        attention += w * (shape.query_size + shape.key_size)
    if shape.rotates_part:
        attention += w * shape.query_size
    is_wide = not (shape.fuses_norms or load.is_compiled)
    if shape.norms_heads:
        attention += (2 * _MASTER if is_wide else w) * (shape.query_size + shape.key_size)
    norms = w * (2 + shape.norms) * shape.hidden + 8
    if is_wide:
        norms = 2 * (_MASTER * shape.norms + w) * shape.hidden
    factors = (4 if shape.is_gated else 2) + (-1 if load.is_compiled else shape.activation_tensors)
    inner = w * factors * (shape.intermediate * shape.experts + shape.shared)
    routing = (
        shape.experts * (2 * w * shape.hidden + _INDICES_BYTES) + 4 * shape.routed if shape.routed else 0
    )
    gate = w * shape.hidden if shape.shared else 0
    return norms + attention + inner + routing + gate


def _kept_bytes(shape: ModelShape, load: RankLoad) -> int:
    """Activations that are kept for the backward, at the end of the forward."""
    w, tokens = load.item_bytes, load.tokens
    per_layer = w * shape.hidden if load.has_checkpoints else layer_token_bytes(shape, load)
    # The last norm, and its rows for the output layer: kept, and with gradients.
    return tokens * (per_layer * shape.layers * (1 + load.has_critic) + 4 * w * shape.hidden)


def _layer_backward_bytes(shape: ModelShape, load: RankLoad) -> int:
    """The inputs of all layers, activations of the last one, which is computed again, and their gradients."""
    inputs = load.item_bytes * shape.hidden * (shape.layers * (1 + load.has_critic) - 1)
    return load.tokens * (inputs + _layer_peak_bytes(shape, load))


def _layer_peak_bytes(shape: ModelShape, load: RankLoad) -> int:
    """Bytes of a layer's activations and of their gradients for each token, in its backward."""
    return layer_token_bytes(shape, load) + _layer_gradient_bytes(shape, load)


def _layer_gradient_bytes(shape: ModelShape, load: RankLoad) -> int:
    rows = shape.experts * shape.hidden if shape.routed else 0
    return 2 * load.item_bytes * (shape.intermediate * shape.experts + rows) + 5 * shape.hidden


def _logits_bytes(shape: ModelShape, load: RankLoad) -> int:
    size = 4 * load.tokens * shape.vocabulary
    chunk = min(size, load.logits_bytes // (4 * shape.vocabulary) * 4 * shape.vocabulary)
    is_compiled = load.is_compiled and not load.has_entropy
    copies = _COMPILED_LOGITS_COPIES[load.item_bytes] if is_compiled else _LOGITS_COPIES
    return int(chunk * (_TRUNCATED_LOGITS_COPIES if load.is_truncated else copies))


# ----------------------------------------------------------------------- weights that are whole for a while


@dataclass(frozen=True, slots=True)
class _Gathered:
    """At the backward of the output layer, at that of a layer, and at the end of a backward."""

    head: int
    layer: int
    end: int


def _gathered_bytes(shape: ModelShape, load: RankLoad) -> _Gathered:
    w, head, layer = load.item_bytes, shape.vocabulary * shape.hidden, shape.layer_parameters
    # A layer that computes, the flat copy that it came in, and the next one on its way.
    layers = 3 * w * layer
    if load.adapter is not None:  # the base is in the type that is computed with, and has no gradient
        outside = w * shape.outside_parameters
        return (
            _Gathered(0, 0, 0)
            if load.ranks == 1
            else _Gathered(outside + layers, outside + layers, 2 * outside)
        )
    # The output layer: its copy in bfloat16; in float32 autograd's sum over the chunks.
    output = 2 * head if w < _MASTER else _MASTER * head
    if load.ranks == 1:
        casts = 2 * layer if w < _MASTER else 0
        every = casts * (1 if load.has_checkpoints else shape.layers)
        return _Gathered(output + (0 if load.has_checkpoints else every), every + w * layer, 0)
    outside = _MASTER * shape.outside_parameters
    # Then a layer's gradient, the float32 input of its reduction, and this rank's part of the result.
    reduction = w * layer + _MASTER * layer + _MASTER * layer // load.parts
    end = 3 * outside + outside // load.parts
    return _Gathered(
        outside + output + _MASTER * head + layers, outside + _MASTER * head + layers + reduction, end
    )


def _publishing_bytes(shape: ModelShape, load: RankLoad) -> int:
    w = load.item_bytes
    if load.publishes_adapter and load.adapter is not None:
        parameters = shape.adapter_parameters(*load.adapter)
        return _MASTER * parameters * (1 + load.publishes)
    # The product of an adapter's matrices, scaled, and added to the rows of the base: in float32.
    merging = 0 if load.adapter is None else 3 * _MASTER * shape.hidden * shape.intermediate // load.parts
    if load.ranks == 1 and load.adapter is None and w == _MASTER:  # the live ones
        return load.publishes * w * shape.parameters
    if load.ranks == 1 and not load.in_shared_pool:  # a whole copy
        return (1 + load.publishes) * w * shape.parameters + merging
    return min(RANGE_BYTES, w * shape.parameters) + merging
