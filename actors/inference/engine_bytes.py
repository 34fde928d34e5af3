"""The memory that an engine needs on each of its devices, from the shape of its model. Pure."""

from dataclasses import dataclass
from typing import Final

from ..model_shape import ModelShape
from .inference_config import EmbeddedEngineConfig, EngineOptions, VllmEngineConfig

# Estimates, not measured: about 1 GiB for the context and the libraries' workspaces, 1 for the activations and logits
# of one step, 1 for CUDA graphs. Too little, and vLLM runs out of memory in its warm-up, which says so, too.
_REST_BYTES: Final = 2 * 2**30
_GRAPHS_BYTES: Final = 2**30


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each device. ``rest_bytes``: for activations, CUDA graphs and the context, an estimate."""

    weights_bytes: int
    kv_cache_bytes: int
    rest_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_cache_bytes + self.rest_bytes


def engine_bytes(shape: ModelShape, options: EngineOptions, item_bytes: int) -> MemoryNeed:
    """The need of an engine whose weights have ``item_bytes`` each; quantised, a byte for each of a linear layer."""
    graphs = 0
    weights = shape.parameters * item_bytes
    if isinstance(options, VllmEngineConfig):
        if options.options.get("quantization") is not None:
            weights -= shape.linear_parameters * (item_bytes - 1)
        graphs = 0 if options.enforce_eager else _GRAPHS_BYTES
    key_values = options.reserved_bytes
    if isinstance(options, EmbeddedEngineConfig):  # it grows up to a limit, or to all rows at their longest
        longest = options.max_context or shape.context
        rows = options.max_batch * longest * shape.key_value_bytes(item_bytes)
        key_values = min(options.kv_cache_bytes, rows)
    return MemoryNeed(-(-weights // options.devices), key_values, _REST_BYTES + graphs)
